"""The connector's counts in vLLM's statistics and on its Prometheus page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.engines.vllm.stats import COUNTERS, merge, summary


@dataclass
class FerryStats(KVConnectorStats):
    """Counts of one interval; ``data`` maps names of `COUNTERS` to numbers."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Counts of both."""
        return FerryStats(data=merge(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """What the log line shows."""
        return dict(summary(self.data))

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class FerryPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each of `COUNTERS`, ``vllm:kvferry_{name}``, with the engine's labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kind = metric_types[Counter]
        self._counters = {
            name: {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}
            for name, text in COUNTERS.items()
            for counter in [kind(name=f"vllm:kvferry_{name}", documentation=text, labelnames=labelnames)]
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(amount)

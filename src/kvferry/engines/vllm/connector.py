"""`KVFerryConnector`: vLLM's connector interface on one side, kvferry's two sides on the other. No logic of its own."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.crossing import crossing_of
from kvferry.engines.vllm.layout import Layout, PageShape, probe
from kvferry.engines.vllm.metadata import FailedLoads, StepMetadata
from kvferry.engines.vllm.metrics import FerryPromMetrics, FerryStats
from kvferry.engines.vllm.pages import Pages
from kvferry.engines.vllm.scheduler import SchedulerSide
from kvferry.engines.vllm.stats import Counts
from kvferry.engines.vllm.store import FolderStore
from kvferry.engines.vllm.support import engine_block_size, engine_identity, require_supported
from kvferry.engines.vllm.worker import WorkerSide, pages_by_layer
from kvferry.errors import UnsupportedCache

logger = logging.getLogger(__name__)


class KVFerryConnector(KVConnectorBase_V1):
    """Keys and values of prompts as kvferry packets, saved by a producer and loaded by a consumer.

    Settings are in ``kv_connector_extra_config``; see `ConnectorConfig`. Raises, when the engine starts, `InvalidInput`
    for wrong settings, `UnsupportedCache` for engines that it cannot serve, and with a mapper what `crossing_of` and
    `Crossing.load_target` do.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = ConnectorConfig.parse(transfer.kv_connector_extra_config)
        require_supported(vllm_config, kv_cache_config)
        self._block = engine_block_size(kv_cache_config)
        self._store = FolderStore(self._config.store)
        self._identity = engine_identity(vllm_config)
        self._crossing = crossing_of(
            self._config,
            self._identity,
            self._config.chunk(self._block),
            produces=transfer.is_kv_producer,
            failure_policy=transfer.kv_load_failure_policy,
        )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._config,
                self._store,
                self._identity if self._crossing is None else self._crossing.source,
                self._block,
                load=transfer.is_kv_consumer,
                save=transfer.is_kv_producer,
                least_first=0 if self._crossing is None else self._crossing.least_first,
                alone=vllm_config.parallel_config.data_parallel_size == 1,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A packet that was not saved is a miss later on, nothing worse."""
        return False

    # The scheduler's side.

    def on_new_request(self, request: Any) -> None:
        """See `KVConnectorBase_V1`."""
        self._planner.admit(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `KVConnectorBase_V1`. Raises `IncompatibleIdentity` where the settings say ``identity: raise``."""
        return self._planner.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `KVConnectorBase_V1`."""
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            self._planner.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See `KVConnectorBase_V1`."""
        cached = scheduler_output.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = [
            (name, before[name], count)
            for name, count in scheduler_output.num_scheduled_tokens.items()
            if name in before
        ]
        state = scheduler_output.kv_connector_block_state

        def blocks_of(name: str) -> list[int] | None:
            groups = None if state is None else state.get_block_ids(name)
            return None if groups is None else groups[0]

        return StepMetadata(self._planner.step(scheduled, blocks_of))

    def update_connector_output(self, connector_output: Any) -> None:
        """See `KVConnectorBase_V1`."""
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, FailedLoads):
            self._planner.failed(told.requests)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """See `KVConnectorBase_V1`: pages are copied when a step ends, so they may be freed at once."""
        self._planner.finished(request)
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See `KVConnectorBase_V1`: finds out how the pages are arranged. Raises `UnsupportedCache`."""
        own = [geometry for geometry in self._identity.layers if geometry.kind.name != "shared"]
        named = pages_by_layer(kv_caches, len(own))
        modules = self._vllm_config.compilation_config.static_forward_context
        layouts: dict[Any, Layout] = {}
        found = []
        for (name, cache), geometry in zip(named, own, strict=True):
            if geometry.head_dim != geometry.value_head_dim:
                raise UnsupportedCache(
                    f"{name}: keys of {geometry.head_dim}, values of {geometry.value_head_dim} elements"
                )
            shape = PageShape(geometry.kv_heads, self._block, geometry.head_dim)
            kind = (shape, tuple(cache.shape), cache.stride(), cache.dtype)
            if kind not in layouts:
                module = modules[name]

                def write(keys: Any, values: Any, scratch: Any, slots: Any, module: Any = module) -> None:
                    module.impl.do_kv_cache_update(module, keys, values, scratch, slots)

                layouts[kind] = probe(write, cache, shape, self._kv_cache_config.num_blocks)
                logger.info("pages of %s are arranged as %r", name, layouts[kind].name)
            found.append(layouts[kind])
        pages = Pages(self._block, tuple(cache for _, cache in named), tuple(found))
        if self._crossing is not None:
            self._crossing.load_target(str(self._vllm_config.model_config.model), self._identity.dtype)
        self._worker = WorkerSide(self._config, self._store, self._identity, pages, self._crossing)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """See `KVConnectorBase_V1`."""
        self._ferry.start(self._jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a synchronous load has ended before the forward begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do before the step is over: pages are read then."""

    def wait_for_save(self) -> None:
        """See `KVConnectorBase_V1`."""
        self._ferry.finish(self._jobs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """See `KVConnectorBase_V1`."""
        return None, self._ferry.take_arrived(idle=self._jobs.idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `KVConnectorBase_V1`."""
        return self._ferry.take_bad_blocks()

    def build_connector_worker_meta(self) -> FailedLoads | None:
        """See `KVConnectorBase_V1`."""
        failed = self._ferry.take_failed()
        return FailedLoads(failed) if failed else None

    def shutdown(self) -> None:
        """See `KVConnectorBase_V1`: ends when every packet under way is in the store."""
        if self._worker is not None:
            self._worker.close()

    # Both sides.

    def get_kv_connector_stats(self) -> FerryStats | None:
        """See `KVConnectorBase_V1`."""
        side: SchedulerSide | WorkerSide | None = self._scheduler or self._worker
        counts = Counts() if side is None else side.counts
        taken = counts.take()
        return FerryStats(data=taken) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """See `KVConnectorBase_V1`."""
        return FerryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> FerryPromMetrics:
        """See `KVConnectorBase_V1`."""
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _planner(self) -> SchedulerSide:
        assert self._scheduler is not None, "the worker's connector was asked to schedule"
        return self._scheduler

    @property
    def _ferry(self) -> WorkerSide:
        assert self._worker is not None, "the connector was asked to load before it was given the engine's caches"
        return self._worker

    @property
    def _jobs(self) -> Any:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.jobs

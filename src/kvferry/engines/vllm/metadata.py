"""What travels between the two sides of the connector, in vLLM's own envelopes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvferry.engines.vllm.jobs import StepJobs


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler → worker: the jobs of one step."""

    jobs: StepJobs = field(default_factory=StepJobs)


@dataclass
class FailedLoads(KVConnectorWorkerMetadata):
    """Worker → scheduler: requests whose loads failed."""

    requests: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both workers' failures."""
        assert isinstance(other, FailedLoads)
        return FailedLoads(self.requests | other.requests)

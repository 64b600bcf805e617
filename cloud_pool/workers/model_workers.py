"""What the rest of a pool needs of its models' workers, whether all models share them or each has its own.

`PoolSupervisor` and `GeneratingWorkers` are these where the models are fixed, `Residents` where they come and go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.workers.generating_replica import GeneratingReplica
from cloud_pool.workers.generating_workers import VariantWorkers
from cloud_pool.workers.replica import Replica
from tidegate.fleet.offers import ModelState, WorkerReport
from tidegate.metrics.generated import GeneratedCounts
from tidegate.serving.generation.sequence_scheduler import SequenceScheduler


class ModelWorkers(Protocol):
    """The workers of models that compute batches."""

    @property
    def state(self) -> ModelState: ...
    @property
    def slots(self) -> Sequence[Replica]: ...
    @property
    def lanes(self) -> Mapping[str, ModelInstance]:
        """The model instances, by key; those that were measured."""
        ...

    @property
    def worker_report(self) -> WorkerReport | None: ...
    @property
    def cold_s(self) -> float:
        """Seconds until the workers would be warm, of a model that is loaded on demand; 0 of one that is there."""
        ...

    @property
    def sandbox(self) -> str | None: ...
    async def failed(self) -> None: ...


class GenerationWorkers(Protocol):
    """The workers of models that generate."""

    @property
    def counts(self) -> GeneratedCounts: ...
    @property
    def variants(self) -> Mapping[str, VariantWorkers]:
        """By the key of what they run."""
        ...

    @property
    def replicas(self) -> Sequence[GeneratingReplica]: ...
    def schedulers(self) -> list[SequenceScheduler]: ...
    async def drained(self) -> None: ...
    async def failed(self) -> None: ...

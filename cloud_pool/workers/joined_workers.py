"""The joined workers of a pool with fixed models: those that its models share, and those of models that came later.

As one for health, metrics and the queue; a model itself is given the workers that are its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.workers.generating_replica import GeneratingReplica
from cloud_pool.workers.generating_workers import GeneratingWorkers, VariantWorkers
from cloud_pool.workers.replica import Replica
from cloud_pool.workers.residents import Residents
from cloud_pool.workers.supervisor import PoolSupervisor
from tidegate.fleet.offers import ModelState, WorkerReport
from tidegate.metrics.generated import GeneratedCounts
from tidegate.runtime.owned_task import first_to_end
from tidegate.serving.generation.sequence_scheduler import SequenceScheduler


class JoinedModelWorkers:
    """`ModelWorkers`. What is said of all together is said of the shared ones."""

    def __init__(self, shared: PoolSupervisor, residents: Residents) -> None:
        self._shared = shared
        self._residents = residents
        self.sandbox = shared.sandbox
        self.cold_s = shared.cold_s

    @property
    def state(self) -> ModelState:
        return self._shared.state

    @property
    def worker_report(self) -> WorkerReport | None:
        return self._shared.worker_report

    @property
    def slots(self) -> Sequence[Replica]:
        return (*self._shared.slots, *self._residents.slots)

    @property
    def lanes(self) -> Mapping[str, ModelInstance]:
        return {**self._shared.lanes, **self._residents.lanes}

    async def failed(self) -> None:
        await first_to_end(self._shared.failed(), self._residents.failed(), name="a supervision has a defect")

    def __repr__(self) -> str:
        return f"<JoinedModelWorkers {self._shared!r} {self._residents!r}>"


class JoinedGenerationWorkers:
    """`GenerationWorkers`, with the counts of the ones of the start."""

    def __init__(self, first: GeneratingWorkers, residents: Residents) -> None:
        self._first = first
        self._residents = residents
        self.counts: GeneratedCounts = first.counts

    @property
    def variants(self) -> Mapping[str, VariantWorkers]:
        return {**self._first.variants, **self._residents.variants}

    @property
    def replicas(self) -> Sequence[GeneratingReplica]:
        return [*self._first.replicas, *self._residents.replicas]

    def schedulers(self) -> list[SequenceScheduler]:
        """Asked for with each request: where no model came later that costs nothing."""
        first = self._first.schedulers()
        return [*first, *self._residents.schedulers()] if len(self._residents) else first

    async def drained(self) -> None:
        await asyncio.gather(self._first.drained(), self._residents.drained())

    async def failed(self) -> None:
        """Of the ones of the start: a defect of the others is told by `JoinedModelWorkers`."""
        await self._first.failed()

    def __repr__(self) -> str:
        return f"<JoinedGenerationWorkers {self._first!r} {self._residents!r}>"

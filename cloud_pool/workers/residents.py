"""Residents are the models of a pool whose models come and go: each has workers of its own while it is in memory.

A process gives its memory back for sure only by ending, and a load in a process that serves would hold up what it
computes; so a model that comes gets a process beside the others (on each place of the pool), and one that goes takes
its process along. Of the workers at one place one computes at a time (`cloud_pool/scheduling/worker_slots.py`).

    Resident     one version of one model: its workers, or what is known of it while it has none
    Residents    all of them, as one, for health, metrics and the servers

A resident's model instances (`lanes`) outlive its workers: what its work costs was measured once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.generating_replica import GeneratingReplica
from cloud_pool.workers.generating_workers import GeneratingWorkers, VariantWorkers
from cloud_pool.workers.replica import Replica
from cloud_pool.workers.steps_worker import StepsWorker
from cloud_pool.workers.supervisor import PoolSupervisor
from tidegate import clock
from tidegate.fleet.offers import ModelState, WorkerReport
from tidegate.metrics.generated import GeneratedCounts
from tidegate.models.manifest import Manifest
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.serving.generation.sequence_scheduler import SequenceScheduler

MakeSupervisor = Callable[[Sequence[PoolLoadable], str, Mapping[str, ModelInstance]], PoolSupervisor]
MakeGenerating = Callable[[Sequence[PoolLoadable]], GeneratingWorkers]


class Resident:
    """The `ModelWorkers` of one version of a model. Mutable: `enter` and `leave`, again and again.

    Args:
        loadables: its variants.
        supervising: makes the workers of a model that computes batches, of its name and with known model instances.
        generating: makes those of a model that generates.
        on_defect: called with what ended a supervision, which only a defect does.
        known: its model instances, where what they cost is known from before.
        cold_s: predicts a cold start of a model of this name; where models are not loaded on demand there is none.
        steps: the worker of the steps around it, which comes and goes with it; None: it has no pipeline.
    """

    def __init__(
        self,
        loadables: Sequence[PoolLoadable],
        *,
        supervising: MakeSupervisor,
        generating: MakeGenerating,
        on_defect: Callable[[BaseException], None],
        sandbox: str | None = None,
        known: Mapping[str, ModelInstance] | None = None,
        cold_s: Callable[[str], float] = lambda _name: 0.0,
        steps: StepsWorker | None = None,
    ) -> None:
        self.loadables = tuple(loadables)
        self.steps = steps
        self.sandbox = sandbox
        self.load_s: float | None = None  # that the last load took until the model was warm
        self._supervising = supervising
        self._generating = generating
        self._on_defect = on_defect
        self._lanes: dict[str, ModelInstance] = dict(known or {})
        self._cold_s = cold_s
        self._workers: PoolSupervisor | GeneratingWorkers | None = None
        self._entering = False
        self._watch: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # of coming and going

    @property
    def manifest(self) -> Manifest:
        return self.loadables[0].manifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def generates(self) -> bool:
        return self.manifest.generative is not None

    @property
    def in_memory(self) -> bool:
        """Whether it has workers that have been warm."""
        return self._workers is not None and not self._entering

    @property
    def state(self) -> ModelState:
        workers = self._workers
        if workers is None:
            return "evicted"
        if isinstance(workers, PoolSupervisor):
            return workers.state
        states = {one.state for one in workers.variants.values()}
        return "ready" if "ready" in states else "loading"

    @property
    def lanes(self) -> Mapping[str, ModelInstance]:
        return self._lanes

    @property
    def cold_s(self) -> float:
        """Seconds until it would be in memory if it was asked for now; 0 while it is."""
        return self._cold_s(self.name)

    @property
    def held_bytes(self) -> float:
        """By its workers together, as far as they know."""
        serving = [slot.current.worker for slot in self.slots if slot.current is not None]
        return float(sum(one.loaded.held_bytes or 0 for one in serving if one is not None))

    @property
    def slots(self) -> Sequence[Replica]:
        return self._workers.slots if isinstance(self._workers, PoolSupervisor) else ()

    @property
    def variants(self) -> Mapping[str, VariantWorkers]:
        return self._workers.variants if isinstance(self._workers, GeneratingWorkers) else {}

    @property
    def worker_report(self) -> WorkerReport | None:
        return self._workers.worker_report if isinstance(self._workers, PoolSupervisor) else None

    async def enter(self) -> None:
        """Start its workers, and return once they are warm. Raises StartError; then it has none."""
        async with self._turn:
            await self._enter()

    async def _enter(self) -> None:
        assert self._workers is None, f"{self!r} is there"
        began_at = clock.now()
        first = self.loadables[0]
        label = f"{first.manifest.name}:{first.manifest.version}{f'@{first.reload}' if first.reload else ''}"
        workers = (
            self._generating(self.loadables)
            if self.generates
            else self._supervising(self.loadables, label, self._lanes)
        )
        self._workers, self._entering = workers, True
        try:
            await self._start(workers)
        except BaseException:
            self._workers = None
            raise
        finally:
            self._entering = False
        self.load_s = clock.now() - began_at
        if isinstance(workers, PoolSupervisor):
            self._lanes.update(workers.lanes)
        self._watch = asyncio.create_task(self._watched(workers), name=f"watch of {label}")

    async def _start(self, workers: PoolSupervisor | GeneratingWorkers) -> None:
        await workers.__aenter__()
        if self.steps is None:
            return
        try:
            await self.steps.__aenter__()  # after the model, around whose answers they are measured
        except BaseException:
            await _ended(workers, f"{self.name} was not started, as its steps were not")
            raise

    async def leave(self, reason: str) -> None:
        """End its workers, once they have computed what they have; what waits is refused."""
        async with self._turn:
            await self._leave(reason)

    async def _leave(self, reason: str) -> None:
        workers, self._workers = self._workers, None
        if workers is None:
            return
        if self._watch is not None:
            await cancel_and_wait(self._watch)
        try:
            if self.steps is not None:
                await self.steps.__aexit__(None, None, None)
        finally:
            await _ended(workers, reason)

    async def failed(self) -> None:
        assert self._workers is not None, f"{self!r} has no workers"
        await self._workers.failed()

    async def _watched(self, workers: PoolSupervisor | GeneratingWorkers) -> None:
        try:
            if self.steps is None:
                await workers.failed()
                return
            async with asyncio.TaskGroup() as both:
                both.create_task(workers.failed(), name=f"watch of {self.name}'s model")
                both.create_task(self.steps.failed(), name=f"watch of {self.name}'s steps")
        except Exception as error:
            self._on_defect(error)

    def __repr__(self) -> str:
        return f"<Resident {self.name}:{self.manifest.version} {self.state}>"


async def _ended(workers: PoolSupervisor | GeneratingWorkers, reason: str) -> None:
    """End workers that have been warm, once they have computed what they have; what waits is refused."""
    try:
        if isinstance(workers, PoolSupervisor):
            await workers.leave(reason)
    finally:
        await workers.__aexit__(None, None, None)


class Residents:
    """All residents of a pool: `ModelWorkers` and `GenerationWorkers` in one. Mutable: `add` and `discard`."""

    def __init__(self, sandbox: str | None = None) -> None:
        self.sandbox = sandbox
        self.counts = GeneratedCounts()
        self._all: list[Resident] = []
        self._defect: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Residents:
        self._defect = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*[one.leave("the pool is shutting down") for one in list(self._all)])
        assert self._defect is not None
        self._defect.cancel()
        with suppress(asyncio.CancelledError, Exception):
            self._defect.exception()  # the one that waited has it

    def add(self, one: Resident) -> None:
        self._all.append(one)

    def discard(self, one: Resident) -> None:
        self._all.remove(one)

    def report(self, error: BaseException) -> None:
        """Take note of a defect that ended a supervision."""
        if self._defect is not None and not self._defect.done():
            self._defect.set_exception(error)

    async def failed(self) -> None:
        assert self._defect is not None, "enter it first"
        await asyncio.shield(self._defect)

    @property
    def cold_s(self) -> float:
        return 0.0

    @property
    def state(self) -> ModelState:
        """Whatever is not in memory is still to be had."""
        return "ready"

    @property
    def slots(self) -> tuple[Replica, ...]:
        return tuple(slot for one in self._all for slot in one.slots)

    @property
    def lanes(self) -> Mapping[str, ModelInstance]:
        return {key: lane for one in self._all for key, lane in one.lanes.items()}

    @property
    def worker_report(self) -> WorkerReport | None:
        return None

    @property
    def variants(self) -> Mapping[str, VariantWorkers]:
        return {key: workers for one in self._all for key, workers in one.variants.items()}

    @property
    def replicas(self) -> list[GeneratingReplica]:
        return [replica for one in self.variants.values() for replica in one.replicas]

    def schedulers(self) -> list[SequenceScheduler]:
        return [one.generating.scheduler for one in self.variants.values()]

    async def drained(self) -> None:
        await asyncio.gather(*[one.drained() for one in self.schedulers()])

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return f"<Residents {', '.join(map(repr, self._all))}>"

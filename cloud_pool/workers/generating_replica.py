"""A generating replica: one generating variant on one device, in a worker process of its own, kept alive.

Generations hold a worker for seconds, a token at a time, and batches want it for milliseconds, whole: in one process
each would wait for the other. So a variant that generates has its own worker on each device, whose slots its
`SequenceScheduler` fills, and the workers of `replica.py` have nothing of it.

Restarts, crash loops and replacement are `tidegate/workers/supervised.py`. A worker that is recycled ends what it has
begun and begins nothing else; one that dies or hangs takes down what it had begun, and what waits is begun by the
other devices' workers, or refused where there is none: gateways have other places for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from cloud_pool.core.sharing.worker_layout import WorkerPlace
from cloud_pool.scheduling.device_arbiter import DeviceArbiter
from cloud_pool.workers.device_worker import DeviceWorker, PoolLoadable
from cloud_pool.workers.generating_start import WorkerStart
from cloud_pool.workers.memory_limit import NO_LIMIT, MemoryLimit
from tidegate import clock
from tidegate.engines.generation.limits import cache_limit_bytes, engine_cache_bytes
from tidegate.fleet.offers import ModelState
from tidegate.runtime.backoff import Backoff
from tidegate.serving.generation.generating_variant import GeneratingVariant
from tidegate.workers.incarnation import Incarnation
from tidegate.workers.lost_workers import LostWorkers
from tidegate.workers.supervised import SupervisedWorker
from tidegate.workers.warmup import measure, warm

log = structlog.get_logger("supervisor")


class GeneratingReplica:
    """Mutable: its worker's state, and what `live` does. Does nothing until `live` runs.

    Args:
        generating: whose generations it begins; all replicas of a variant have the same.
        allotment: the devices' memory, which the worker's weights and attention caches take a part of.
        start: makes its workers' processes.
        cache_bytes: of attention caches at most; None: `cache_limit_bytes`.
        warmup_budget_s: for measuring, where no replica has measured the variant yet.
        on_change: called after each change of `state`.
        on_lost: called when a worker has hung or died.
    """

    def __init__(
        self,
        loadable: PoolLoadable,
        place: WorkerPlace,
        generating: GeneratingVariant,
        allotment: DeviceArbiter,
        *,
        start: WorkerStart,
        backoff: Backoff,
        cache_bytes: int | None = None,
        memory_limit: MemoryLimit = NO_LIMIT,
        paced_slow: float = 1.0,
        hang_timeout_s: float = 30.0,
        warmup_budget_s: float = 10.0,
        on_change: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.place = place
        self.lost_workers = LostWorkers()
        self.workers: dict[str, DeviceWorker] = {}  # by the name of their incarnation: those that serve
        self._loadable = loadable
        self._generating = generating
        self._allotment = allotment
        self._start = start
        self._limit_bytes = cache_limit_bytes(loadable.manifest, loadable.variant, cache_bytes)  # the queue's
        self._cache_bytes = engine_cache_bytes(loadable.manifest, loadable.variant, cache_bytes)
        self._memory_limit = memory_limit
        self._paced_slow = paced_slow
        self._hang_timeout_s = hang_timeout_s
        self._warmup_budget_s = warmup_budget_s
        self._on_change = on_change
        self._on_lost = on_lost
        self._slots = 0
        self._supervised = SupervisedWorker[DeviceWorker](
            self,
            start=self._started,
            name_of=lambda number: f"{self.name}.{number}",
            backoff=backoff,
            cannot_start=f"{loadable.key} cannot be served",
            prepare_within_s=start.within_s,
        )

    @property
    def key(self) -> str:
        """Of its variant."""
        return self._loadable.key

    @property
    def name(self) -> str:
        """Of its variant and its place."""
        return f"{self._loadable.key}@{self.place.name}"

    @property
    def sandboxed(self) -> bool:
        """Whether its workers are in the sandbox, as far as there is one."""
        return self._start.sandboxed

    @property
    def successor_beside(self) -> bool:
        """Whether another worker may be started here while one serves."""
        return self._start.successor_beside

    @property
    def state(self) -> ModelState:
        return self._supervised.state

    @property
    def ready_once(self) -> asyncio.Event:
        """Set when a worker has been ready here for the first time."""
        return self._supervised.ready_once

    @property
    def tried_once(self) -> asyncio.Event:
        """Set when the first worker here was ready, or was lost."""
        return self._supervised.tried_once

    @property
    def restarts(self) -> int:
        """Workers after the first."""
        return max(0, self._supervised.count - 1)

    async def live(self, *, must_start: bool = True) -> None:
        """Run one incarnation after another, for ever. Raises StartError when the first one fails, if it must start."""
        try:
            await self._supervised.live(must_start=must_start)
        finally:
            for name in list(self.workers):
                self._gone(name, f"worker {name} was told to end")

    async def recycle(self, *, successor_first: bool) -> bool:
        """Replace the worker that serves by a fresh one, and wait for it; False if that did not come to be."""
        return await self._supervised.replace(successor_first=successor_first)

    # what the supervised worker needs of its owner (`tidegate.workers.supervised.WorkerOwner`)

    async def prepare(self, worker: DeviceWorker) -> float:
        key, manifest, variant = self._loadable.key, self._loadable.manifest, self._loadable.variant
        began_at = clock.now()
        self._slots = (await worker.load(self._loadable, cache_bytes=self._cache_bytes)).slots
        loaded_s = clock.now() - began_at
        if self._generating.service is not None:
            await warm(worker, key, manifest, variant)
            return loaded_s
        self._supervised.become("warming")
        self._generating.measured(await measure(worker, key, manifest, variant, budget_s=self._warmup_budget_s))
        return loaded_s

    async def end_of(self, worker: DeviceWorker) -> str:
        return await worker.end()

    def serve(self, incarnation: Incarnation[DeviceWorker]) -> None:
        """Let generations begin there, with what the worker holds of its device taken into account."""
        assert incarnation.worker is not None
        name, worker = incarnation.name, incarnation.worker
        if name in self.workers:
            return
        loaded = worker.loaded
        limit_bytes, held_bytes = self._memory_limit.of(loaded.device_bytes), loaded.held_bytes or 0
        self._allotment.join(
            name,
            worker.memory_of,
            held_bytes=held_bytes + self._cache_bytes,
            limit_bytes=limit_bytes,
        )
        self.workers[name] = worker
        self._generating.scheduler.open(name, slots=self._slots, limit_bytes=self._limit_bytes)

    def back(self, incarnation: Incarnation[DeviceWorker]) -> None:
        log.info("worker back", worker=incarnation.name)

    def successor_lost(self, incarnation: Incarnation[DeviceWorker], successor: Incarnation[DeviceWorker]) -> None:
        log.warning("successor lost", worker=incarnation.name, reason=successor.reason)

    def ending(self, incarnation: Incarnation[DeviceWorker]) -> None:
        """Count it, and let nothing begin there: it may take a second to be reaped."""
        self.lost_workers.lost(incarnation.reason, clock.now())
        self._gone(incarnation.name, incarnation.reason)

    def lost(self, incarnation: Incarnation[DeviceWorker]) -> None:
        if incarnation.ready_at is None:  # it never served, so its end was told to nobody
            self.lost_workers.lost(incarnation.reason, clock.now())
        self._gone(incarnation.name, incarnation.reason)

    def restarting(self, incarnation: Incarnation[DeviceWorker], delay_s: float) -> None:
        words = {"worker": incarnation.name, "reason": incarnation.reason, "restart_in_s": round(delay_s, 3)}
        log.warning("worker lost", **words, state=self.state)
        self._on_lost()

    async def retire(self, incarnation: Incarnation[DeviceWorker]) -> None:
        await self._generating.scheduler.retire(incarnation.name)
        self._gone(incarnation.name, f"worker {incarnation.name} is recycled")

    def changed(self) -> None:
        self._on_change()

    def _gone(self, name: str, reason: str) -> None:
        if self.workers.pop(name, None) is not None:
            self._allotment.leave(name)
        self._generating.scheduler.close(name, reason)

    @asynccontextmanager
    async def _started(self, name: str) -> AsyncIterator[DeviceWorker]:
        async with self._start.start_process(name, self.place.cores) as process:
            yield DeviceWorker(
                process,
                device=self.place.device,
                threads=self.place.threads,
                hang_timeout_s=self._hang_timeout_s,
                paced_slow=self._paced_slow,
            )

    def __repr__(self) -> str:
        return f"<GeneratingReplica {self._loadable.key} on {self.place.name} {self.state}>"

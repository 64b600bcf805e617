"""A replica: a place for a pool worker (a device, threads, cores), and one incarnation after another in it.

Restarts, crash loops and replacement are `tidegate/workers/supervised.py`; a replica says what they mean to a pool. A
warm worker is attached to the scheduler, a lost one detached, and one that is recycled ends its batch and gets no
other; what waits is then served by the other workers, or waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

from cloud_pool.core.sharing.worker_layout import WorkerPlace
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.workers.device_worker import DeviceWorker, StartProcess
from cloud_pool.workers.memory_limit import NO_LIMIT, MemoryLimit
from tidegate import clock
from tidegate.fleet.offers import ModelState
from tidegate.runtime.backoff import Backoff
from tidegate.workers.incarnation import Incarnation
from tidegate.workers.lost_workers import LostWorkers
from tidegate.workers.supervised import SupervisedWorker

log = structlog.get_logger("supervisor")


class Replica:
    """Mutable: its worker's state, and what `live` does. Does nothing until `live` runs.

    Args:
        standby: whether its workers are a reserve (`cloud_pool/core/health/standby.py`).
        lanes: the model instances that its workers hold, by key; None: all of the pool.
        prefix: begins the names of its workers, where several replicas share a place.
        prepare: loads and warms everything, and says when it begins to warm what was never measured; returns the
            seconds that a later incarnation should need for it.
        on_change: called after each change of `state`.
        on_lost: called when a worker has hung or died.
    """

    def __init__(
        self,
        place: WorkerPlace,
        scheduler: PoolScheduler,
        *,
        start_process: StartProcess,
        prepare: Callable[[DeviceWorker, Callable[[], None]], Awaitable[float]],
        backoff: Backoff,
        standby: bool = False,
        lanes: frozenset[str] | None = None,
        prefix: str = "",
        paced_slow: float = 1.0,
        hang_timeout_s: float = 30.0,
        memory_limit: MemoryLimit = NO_LIMIT,
        on_change: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.place = place
        self.standby = standby
        self.lost_workers = LostWorkers()
        self._lanes = lanes
        self._name = f"{prefix}{place.name}"
        self._scheduler = scheduler
        self._start_process = start_process
        self._prepare = prepare
        self._paced_slow = paced_slow
        self._hang_timeout_s = hang_timeout_s
        self._memory_limit = memory_limit
        self._on_change = on_change
        self._on_lost = on_lost
        self._fed: set[str] = set()  # the names of the workers that the scheduler has
        self._restart_s = 0.0  # that a successor should need, as the last one that was warm needed
        self._supervised = SupervisedWorker[DeviceWorker](
            self,
            start=self._started,
            name_of=lambda number: f"{prefix}{place.name}.{number}",
            backoff=backoff,
            cannot_start="the pool cannot start",
        )

    @property
    def name(self) -> str:
        """Of its place, behind its model where several share one."""
        return self._name

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
    def current(self) -> Incarnation[DeviceWorker] | None:
        """The incarnation that serves, or served last; None before the first."""
        return self._supervised.current

    async def live(self, *, must_start: bool = True) -> None:
        """Run one incarnation after another, for ever. Raises StartError when the first one fails, if it must start."""
        try:
            await self._supervised.live(must_start=must_start)
        finally:
            for name in list(self._fed):
                self._gone(name, f"worker {name} was told to end")

    async def recycle(self, *, successor_first: bool) -> bool:
        """Replace the worker that serves by a fresh one, and wait for it; False if that did not come to be."""
        return await self._supervised.replace(successor_first=successor_first)

    async def leave(self, reason: str) -> None:
        """Have the worker that serves finish its batches, and feed it no longer."""
        if (incarnation := self._supervised.current) is not None:
            await self._scheduler.retire(incarnation.name)
            self._gone(incarnation.name, reason)

    # what the supervised worker needs of its owner (`tidegate.workers.supervised.WorkerOwner`)

    async def prepare(self, worker: DeviceWorker) -> float:
        return await self._prepare(worker, lambda: self._supervised.become("warming"))

    async def end_of(self, worker: DeviceWorker) -> str:
        return await worker.end()

    def serve(self, incarnation: Incarnation[DeviceWorker]) -> None:
        """Attach the worker to the scheduler, with what it holds of its device taken into account."""
        assert incarnation.worker is not None
        if not incarnation.serving:  # its end has come while a successor was tried
            return
        name, worker, loaded = incarnation.name, incarnation.worker, incarnation.worker.loaded
        limit_bytes, held_bytes = self._memory_limit.of(loaded.device_bytes), loaded.held_bytes or 0
        self._fed.add(name)
        self._restart_s = incarnation.restart_s
        self._scheduler.allotment.join(name, worker.memory_of, held_bytes=held_bytes, limit_bytes=limit_bytes)
        self._scheduler.attach(
            name,
            worker.infer,
            restart_s=incarnation.restart_s,
            standby=self.standby,
            lanes=self._lanes,
            place=self.place.name,
        )

    def back(self, incarnation: Incarnation[DeviceWorker]) -> None:
        log.info("worker back", worker=incarnation.name)

    def successor_lost(self, incarnation: Incarnation[DeviceWorker], successor: Incarnation[DeviceWorker]) -> None:
        log.warning("successor lost", worker=incarnation.name, reason=successor.reason)

    def ending(self, incarnation: Incarnation[DeviceWorker]) -> None:
        """Count it, and feed it no longer: where it hangs it takes a second to be reaped, or has no end at all."""
        self.lost_workers.lost(incarnation.reason, clock.now())
        if incarnation is self._supervised.current:
            self._supervised.become("loading")
        self._gone(incarnation.name, incarnation.reason)

    def lost(self, incarnation: Incarnation[DeviceWorker]) -> None:
        if incarnation.ready_at is None:  # it never served, so its end was told to nobody
            self.lost_workers.lost(incarnation.reason, clock.now())
        self._gone(incarnation.name, incarnation.reason)

    def restarting(self, incarnation: Incarnation[DeviceWorker], delay_s: float) -> None:
        words = {"worker": incarnation.name, "reason": incarnation.reason, "restart_in_s": round(delay_s, 3)}
        log.warning("worker lost", **words, state=self.state)
        self._scheduler.absent_for(self._lanes, delay_s + self._restart_s, incarnation.reason)
        self._on_lost()

    async def retire(self, incarnation: Incarnation[DeviceWorker]) -> None:
        await self._scheduler.retire(incarnation.name)
        self._gone(incarnation.name, f"worker {incarnation.name} is recycled")

    def changed(self) -> None:
        self._on_change()

    def _gone(self, name: str, reason: str) -> None:
        self._fed.discard(name)
        self._scheduler.detach(name, reason)

    @asynccontextmanager
    async def _started(self, name: str) -> AsyncIterator[DeviceWorker]:
        async with self._start_process(name, self.place.cores) as process:
            yield DeviceWorker(
                process,
                device=self.place.device,
                threads=self.place.threads,
                hang_timeout_s=self._hang_timeout_s,
                paced_slow=self._paced_slow,
            )

    def __repr__(self) -> str:
        reserve = ", in reserve" if self.standby else ""
        return f"<Replica {self._name} {self.state}, life {self._supervised.count}{reserve}>"

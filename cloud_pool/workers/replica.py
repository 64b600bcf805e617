"""A slot: a place for a worker (a device, threads, cores), and one life after another in it.

    loading → warming → ready → (it died or hung) → loading → …       after CRASH_LOOP lives without health: bad
                          ↑  └─ (recycled) ─┐
                          └─────────────────┘

Each life is loaded and warm before it gets a batch. A slot's first life must succeed: an artefact that does not load is
a reason not to start, told by name. Restarts wait a full-jitter backoff, which is forgotten after HEALTHY_S of service;
`bad` is still tried.

A healthy worker can be replaced by a fresh one (`recycle`), with nobody refused for it: the old one ends its batch and
gets no other. Where memory allows, its successor is started first and takes over when it is warm; if it does not come
up, the old one stays. Otherwise the old one goes first, and what waits is served by the others or waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from cloud_pool.core.sharing.worker_layout import WorkerPlace
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.workers.device_worker import DeviceWorker, StartProcess
from cloud_pool.workers.incarnation import Incarnation
from cloud_pool.workers.memory_limit import NO_LIMIT, MemoryLimit
from tidegate import clock
from tidegate.fleet.offers import ModelState
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.runtime.process import StartError

CRASH_LOOP = 3
HEALTHY_S = 30.0

log = structlog.get_logger("supervisor")


class Replica:
    """Mutable: `state`, and what `live` does. Does nothing until `live` runs.

    Args:
        standby: whether its workers are a reserve (`cloud_pool/core/health/standby.py`).
        prepare: loads and warms everything, and says when it begins to warm what was never measured; returns the
            seconds that a later life should need for it.
        on_change: called after each change of `state`.
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
        paced_slow: float = 1.0,
        hang_timeout_s: float = 30.0,
        memory_limit: MemoryLimit = NO_LIMIT,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.place = place
        self.standby = standby
        self.state: ModelState = "loading"
        self.ready_once = asyncio.Event()
        self.current: Incarnation | None = None
        self._count = 0
        self._scheduler = scheduler
        self._start_process = start_process
        self._prepare = prepare
        self._backoff = backoff
        self._paced_slow = paced_slow
        self._hang_timeout_s = hang_timeout_s
        self._memory_limit = memory_limit
        self._on_change = on_change
        self._lives: set[Incarnation] = set()
        self._wish: asyncio.Future[bool] | None = None
        self._recycled: asyncio.Future[bool] | None = None

    async def live(self) -> None:
        """One life after another, for ever. Raises StartError when the first one fails."""
        try:
            life = await self._next()
            while True:
                self._serve(life)
                life = await self._until_next(life)
        finally:
            for one in self._lives:
                await one.end()

    async def recycle(self, *, successor_first: bool) -> bool:
        """Replace the worker that serves by a fresh one, and wait for it; False if that did not come to be."""
        if self._wish is None or self._wish.done() or self.state != "ready":
            return False
        self._recycled = asyncio.get_running_loop().create_future()
        self._wish.set_result(successor_first)
        return await self._recycled

    def _begin(self) -> Incarnation:
        self._count += 1
        life = Incarnation(
            f"{self.place.name}.{self._count}",
            self.place,
            start_process=self._start_process,
            prepare=lambda worker: self._prepare(worker, lambda: self._become("warming")),
            paced_slow=self._paced_slow,
            hang_timeout_s=self._hang_timeout_s,
        )
        self._lives.add(life)
        life.begin()
        return life

    async def _next(self) -> Incarnation:
        """A life that is ready, after as many as it takes."""
        while True:
            life = self._begin()
            if await life.is_ready():
                return life
            await self._lost(life)

    def _serve(self, life: Incarnation) -> None:
        self._attach(life)
        if self.current not in (None, life):
            log.info("worker back", worker=life.name)
        self.current, self._wish = life, asyncio.get_running_loop().create_future()
        self._become("ready")
        self.ready_once.set()
        if self._recycled is not None and not self._recycled.done():
            self._recycled.set_result(True)

    def _attach(self, life: Incarnation) -> None:
        """Its worker may be fed, with what it holds taken into account."""
        assert life.worker is not None
        worker, loaded = life.worker, life.worker.loaded
        limit_bytes, held_bytes = self._memory_limit.of(loaded.device_bytes), loaded.held_bytes or 0
        self._scheduler.allotment.join(life.name, worker.memory_of, held_bytes=held_bytes, limit_bytes=limit_bytes)
        self._scheduler.attach(life.name, worker.infer, restart_s=life.restart_s, standby=self.standby)

    async def _until_next(self, life: Incarnation) -> Incarnation:
        """Wait for a reason for another life than this one, and then until that is ready."""
        assert self._wish is not None
        over = asyncio.create_task(life.wait_over(), name=f"worker {life.name} is over")
        try:
            await asyncio.wait((over, self._wish), return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                over.result()
        finally:
            await cancel_and_wait(over)
        if not life.over and self._wish.result():
            return await self._handed_over(life)
        if not life.over:
            await self._ended(life)
            return await self._next()
        await self._lost(life)
        return await self._next()

    async def _handed_over(self, life: Incarnation) -> Incarnation:
        """Its successor, warm, with itself ended; or itself, if there came none."""
        fresh = self._begin()
        if await fresh.is_ready():
            self._attach(fresh)
            await self._ended(life)
            return fresh
        log.warning("successor lost", worker=life.name, reason=fresh.reason)
        self._lives.discard(fresh)
        self._no_recycle()
        return life

    async def _ended(self, life: Incarnation) -> None:
        """It has done what it had, and is gone."""
        await self._scheduler.retire(life.name)
        self._scheduler.detach(life.name, f"worker {life.name} is recycled")
        await life.end()
        self._lives.discard(life)

    async def _lost(self, life: Incarnation) -> None:
        """It ended by itself: say so, and wait as long as that takes."""
        self._scheduler.detach(life.name, life.reason)
        self._lives.discard(life)
        self._no_recycle()
        if not self.ready_once.is_set():
            raise StartError(f"the pool cannot start: {life.reason}")
        if life.served_s >= HEALTHY_S:
            self._backoff.reset()
        delay_s = self._backoff.next_delay_s()
        self._become("bad" if self._backoff.failures >= CRASH_LOOP else "loading")
        words = {"worker": life.name, "reason": life.reason, "restart_in_s": round(delay_s, 3), "state": self.state}
        log.warning("worker lost", **words)
        await clock.sleep(delay_s)

    def _no_recycle(self) -> None:
        if self._recycled is not None and not self._recycled.done():
            self._recycled.set_result(False)

    def _become(self, state: ModelState) -> None:
        if state != self.state:
            self.state = state
            self._on_change()

    def __repr__(self) -> str:
        reserve = ", in reserve" if self.standby else ""
        return f"<Replica {self.place.name} {self.state}, life {self._count}{reserve}>"

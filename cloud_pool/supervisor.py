"""The supervisor: one worker after another on a device, each loaded and warm before it gets a batch.

    loading → warming → ready → (it died or hung) → loading → …       after CRASH_LOOP lives without health: bad

The first life measures what every variant costs here; later ones only run the smallest and the largest size once,
since the costs are known. The first life must succeed: an artefact that does not load is a reason not to start,
told by name. Restarts wait a full-jitter backoff, which is forgotten after HEALTHY_S of service; `bad` is still
tried.

While there is no worker the scheduler holds those who can wait and refuses the others (`Scheduler.detach`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import structlog

from cloud_pool.core.lane import Lane
from cloud_pool.scheduler import Scheduler
from cloud_pool.worker import DeviceWorker, Loadable, StartProcess
from tidegate import clock
from tidegate.backoff import Backoff
from tidegate.fleet.offers import ModelState
from tidegate.outcome import ServeError
from tidegate.process import StartError
from tidegate.workers.warmup import measure, warm

CRASH_LOOP = 3
HEALTHY_S = 30.0
WARMUP_TIMEOUT_S = 300.0  # measuring stops by itself much earlier; this is for a worker that hangs in it

log = structlog.get_logger(__name__)


class Supervisor:
    """Alive inside `async with`, which returns once every model is warm.

    Args:
        start_process: makes a worker process of a name; entered for each life.
        warmup_budget_s: for measuring, shared by all variants.
        on_change: called after each change of `state`.
        on_progress: told in words what a start is at.
    """

    def __init__(
        self,
        loadables: Sequence[Loadable],
        scheduler: Scheduler,
        *,
        start_process: StartProcess,
        backoff: Backoff,
        device: str = "auto",
        threads: int = 0,
        hang_timeout_s: float = 30.0,
        warmup_budget_s: float = 10.0,
        on_change: Callable[[], None] = lambda: None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.state: ModelState = "loading"
        self.lanes: dict[str, Lane] = {}
        self._loadables = tuple(loadables)
        self._scheduler = scheduler
        self._start_process = start_process
        self._backoff = backoff
        self._worker = partial(DeviceWorker, device=device, threads=threads, hang_timeout_s=hang_timeout_s)
        self._warmup_budget_s = warmup_budget_s
        self._on_change = on_change
        self._on_progress = on_progress
        self._ready_once = asyncio.Event()
        self._life = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._live(), name="supervisor")
        ready = asyncio.create_task(self._ready_once.wait(), name="first start")
        try:
            await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
        except BaseException:
            await _cancelled(self._task)
            raise
        finally:
            await _cancelled(ready)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            await _cancelled(self._task)

    async def failed(self) -> None:
        """Wait for the end of the supervision itself, which never comes but by a defect: raises that."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _live(self) -> None:
        while True:
            reason, healthy_s = await self._one_life()
            self._scheduler.detach(reason)
            if not self._ready_once.is_set():
                raise StartError(f"the pool cannot start: {reason}")
            if healthy_s >= HEALTHY_S:
                self._backoff.reset()
            delay_s = self._backoff.next_delay_s()
            self._become("bad" if self._backoff.failures >= CRASH_LOOP else "loading")
            log.warning("worker lost", reason=reason, restart_in_s=round(delay_s, 3), state=self.state)
            await clock.sleep(delay_s)

    async def _one_life(self) -> tuple[str, float]:
        """One worker from its start to its end; why it ended, and how long it served."""
        ready_at: float | None = None
        self._life += 1
        try:
            async with self._start_process(f"{self._life}") as process:
                worker = self._worker(process)
                async with asyncio.timeout(WARMUP_TIMEOUT_S):
                    restart_s = await self._prepare(worker)
                ready_at = clock.now()
                self._serve(worker, restart_s)
                reason = await worker.end()
        except ServeError as error:
            reason = error.message
        except TimeoutError:
            reason = f"the worker was not warm within {WARMUP_TIMEOUT_S:g} s"
        except OSError as error:
            reason = f"the worker could not be started: {error}"
        return reason, 0.0 if ready_at is None else clock.now() - ready_at

    async def _prepare(self, worker: DeviceWorker) -> float:
        """Load and warm everything; returns the seconds that a later life should need for it."""
        began_at = clock.now()
        for loadable in self._loadables:
            self._on_progress(f"loading {loadable.key}")
            await worker.load(loadable)
        loaded_s = clock.now() - began_at
        if not self.lanes:
            self._become("warming")
        for loadable in self._loadables:
            await self._warm(worker, loadable)
        return loaded_s

    async def _warm(self, worker: DeviceWorker, loadable: Loadable) -> None:
        key, manifest, variant = loadable.key, loadable.manifest, loadable.variant
        if key in self.lanes:
            await warm(worker, key, manifest, variant)
            return
        self._on_progress(f"measuring {key}")
        budget_s = self._warmup_budget_s / len(self._loadables)
        cost = await measure(worker, key, manifest, variant, budget_s=budget_s)
        self.lanes[key] = lane = Lane(key, manifest, variant, cost)
        self._scheduler.open(lane)

    def _serve(self, worker: DeviceWorker, restart_s: float) -> None:
        self._scheduler.attach(worker.infer, restart_s=restart_s)
        self._become("ready")
        if self._ready_once.is_set():
            log.info("worker back", life=self._life)
        self._ready_once.set()

    def _become(self, state: ModelState) -> None:
        if state != self.state:
            self.state = state
            self._on_change()

    def __repr__(self) -> str:
        return f"<Supervisor {self.state}, life {self._life}, {len(self._loadables)} variants>"


async def _cancelled(*tasks: asyncio.Task[None] | asyncio.Task[bool]) -> None:
    """Cancel the tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

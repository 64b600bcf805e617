"""A life: one worker process from its start to its end.

    starting → ready → over            over: it died, hung, could not be started, or was told to end

It knows nothing of queues, of restarts or of other lives: `replica.py` lets one follow another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cloud_pool.core.sharing.worker_layout import WorkerPlace
from cloud_pool.workers.device_worker import DeviceWorker, StartProcess
from tidegate import clock
from tidegate.outcome import ServeError
from tidegate.runtime.owned_task import cancel_and_wait

WARMUP_TIMEOUT_S = 300.0  # measuring stops by itself much earlier; this is for a worker that hangs in it

Prepare = Callable[[DeviceWorker], Awaitable[float]]


class Incarnation:
    """Begins with `begin`, ends by itself or with `end`.

    Args:
        name: of this life and no other.
        prepare: loads and warms everything; returns the seconds that a later life should need for it.
    """

    def __init__(
        self,
        name: str,
        place: WorkerPlace,
        *,
        start_process: StartProcess,
        prepare: Prepare,
        paced_slow: float,
        hang_timeout_s: float,
    ) -> None:
        self.name = name
        self.worker: DeviceWorker | None = None
        self.restart_s = 0.0
        self.ready_at: float | None = None
        self.reason = "it was told to end"
        self._place = place
        self._start_process = start_process
        self._prepare = prepare
        self._paced_slow = paced_slow
        self._hang_timeout_s = hang_timeout_s
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"worker {self.name}")

    async def is_ready(self) -> bool:
        """Wait until it is warm, or over before it was."""
        assert self._task is not None
        ready = asyncio.create_task(self._ready.wait(), name=f"worker {self.name} is ready")
        try:
            await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(ready)
        return not self.over

    async def wait_over(self) -> None:
        """Wait for its end; `reason` says why it came. Raises what nobody expected."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def end(self) -> None:
        """End the process, whatever it does."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    @property
    def over(self) -> bool:
        return self._task is not None and self._task.done()

    @property
    def served_s(self) -> float:
        """How long it has been ready."""
        return 0.0 if self.ready_at is None else clock.now() - self.ready_at

    async def _run(self) -> None:
        try:
            async with self._start_process(self.name, self._place.cores) as process:
                self.worker = DeviceWorker(
                    process,
                    device=self._place.device,
                    threads=self._place.threads,
                    hang_timeout_s=self._hang_timeout_s,
                    paced_slow=self._paced_slow,
                )
                async with asyncio.timeout(WARMUP_TIMEOUT_S):
                    self.restart_s = await self._prepare(self.worker)
                self.ready_at = clock.now()
                self._ready.set()
                self.reason = await self.worker.end()
        except ServeError as error:
            self.reason = error.message
        except TimeoutError:
            self.reason = f"the worker was not warm within {WARMUP_TIMEOUT_S:g} s"
        except OSError as error:
            self.reason = f"the worker could not be started: {error}"

    def __repr__(self) -> str:
        state = f"over: {self.reason}" if self.over else "ready" if self._ready.is_set() else "starting"
        return f"<Incarnation {self.name} {state}>"

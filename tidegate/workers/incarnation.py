"""An incarnation: one worker process from its start to its end.

    starting → ready → over            over: it died, hung, could not be started, or was told to end

An incarnation knows nothing of queues, of restarts or of other incarnations: `supervised.py` lets one follow another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from tidegate import clock
from tidegate.outcome import ServeError
from tidegate.runtime.owned_task import cancel_and_wait

WARMUP_TIMEOUT_S = 300.0  # measuring stops by itself much earlier; this is for a worker that hangs in it

W = TypeVar("W")
StartWorker = Callable[[str], AbstractAsyncContextManager[W]]


class Incarnation(Generic[W]):
    """Begins with `begin`, ends by itself or with `end`.

    Args:
        name: of this incarnation and no other.
        start: makes the worker of that name; leaving its context ends the process.
        prepare: loads and warms everything; returns the seconds that a later incarnation should need for it.
        end_of: waits until the worker has died or is to be ended, and says why.
        on_ending: called when that is known, before the process is reaped, which takes a second where it hangs.
        prepare_within_s: how long `prepare` may take.
    """

    def __init__(
        self,
        name: str,
        *,
        start: StartWorker[W],
        prepare: Callable[[W], Awaitable[float]],
        end_of: Callable[[W], Awaitable[str]],
        on_ending: Callable[[], None] = lambda: None,
        prepare_within_s: float = WARMUP_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.worker: W | None = None
        self.serving = False  # warm, and its end has not come
        self.restart_s = 0.0
        self.ready_at: float | None = None
        self.reason = "it was told to end"
        self._start = start
        self._prepare = prepare
        self._end_of = end_of
        self._on_ending = on_ending
        self._prepare_within_s = prepare_within_s
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
        """Wait for its end; `reason` says why it came. Raises what is a defect and no end of a worker."""
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
            async with self._start(self.name) as worker:
                self.worker = worker
                async with asyncio.timeout(self._prepare_within_s):
                    self.restart_s = await self._prepare(worker)
                self.ready_at = clock.now()
                await self._serve(worker)
        except ServeError as error:
            self.reason = error.message
        except TimeoutError:
            self.reason = f"the worker was not warm within {self._prepare_within_s:g} s"
        except OSError as error:
            self.reason = f"the worker could not be started: {error}"

    async def _serve(self, worker: W) -> None:
        self.serving = True
        self._ready.set()
        try:
            self.reason = await self._end_of(worker)
        finally:
            self.serving = False
        self._on_ending()

    def __repr__(self) -> str:
        state = f"over: {self.reason}" if self.over else "ready" if self._ready.is_set() else "starting"
        return f"<Incarnation {self.name} {state}>"

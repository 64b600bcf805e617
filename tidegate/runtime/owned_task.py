"""A background task has one owner: it runs from when the owner is entered until the owner is left, and no longer.

    self._looking = OwnedTask(self._look, name="sensors")    # stores its arguments
    self._looking.start()                                    # in the owner's __aenter__
    await self._looking.aclose()                             # in its __aexit__: cancelled, and has ended

An owner with nothing else to start and to stop enters the task itself: `async with`, or on an `AsyncExitStack`.

When `aclose` returns, the task has ended, so nothing uses what the owner closes next. The same holds when the owner is
cancelled while it waits in `aclose`: the task is cancelled once more, ends, and only then the cancellation goes on.
Other tasks (those of a request, or of a race between two events) are ended the same way, by `cancel_and_wait`.

A task of this kind never ends by itself, or ends because its work is done. An exception out of it is a defect that no
caller awaits: it is logged as an error at the moment it happens, with its traceback, and not when the process stops. It
is not raised in `aclose`, where it would keep others from being closed. A task that must survive a defect in one of its
rounds catches it inside the round; a task whose defect must end the process has a supervisor instead
(`edge_agent/serving/runner.py`, `cloud_pool/workers/supervisor.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Self

import structlog

log = structlog.get_logger(__name__)


class OwnedTask:
    """One background task at a time; it can be started again after it was closed.

    Args:
        run: makes the work; called by `start`.
        name: the task's, for logs and debuggers.
        crash_means: the log line of a crash, which names what stops working.
    """

    def __init__(
        self,
        run: Callable[[], Coroutine[Any, Any, None]],
        *,
        name: str,
        crash_means: str = "a background task has crashed",
    ) -> None:
        self._run = run
        self._name = name
        self._crash_means = crash_means
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def start(self) -> None:
        """Begin; the first step of the work is taken when the loop gets to it."""
        assert self._task is None, f"the task {self._name!r} is started already"
        self._task = asyncio.create_task(self._run(), name=self._name)
        self._task.add_done_callback(self._complain)

    async def aclose(self) -> None:
        """Cancel the task and wait until it has ended; nothing where it was never started."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait(task)

    def _complain(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error(self._crash_means, task=self._name, exc_info=task.exception())

    def __repr__(self) -> str:
        state = "not started" if self._task is None else "ended" if self._task.done() else "runs"
        return f"<OwnedTask {self._name} {state}>"


async def cancel_and_wait(*tasks: asyncio.Future[Any], why: str | None = None) -> None:
    """Cancel the tasks and wait until they have ended; what they raise is left to their other awaiters.

    Args:
        why: what their CancelledError says.
    """
    for task in tasks:
        task.cancel(why)
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        forget_cancellation(task)


def forget_cancellation(task: asyncio.Future[Any]) -> None:
    """Let a cancelled task go of its CancelledError, if it has ended so; who asks for its result gets a new one.

    The error's traceback holds the frames that it passed, and where one of them knows the task (`asyncio.timeout`
    does), all that the work held would be there until garbage is collected.
    """
    if task.cancelled():
        with suppress(asyncio.CancelledError):
            task.result()


async def first_to_end(*waits: Coroutine[Any, Any, None], name: str) -> None:
    """Run them side by side until the first one ends, and raise what it raises; the others are cancelled.

    Args:
        name: of their tasks, for logs and debuggers.
    """
    tasks = [asyncio.create_task(one, name=name) for one in waits]
    try:
        await until_one_ends(tasks)
    finally:
        await cancel_and_wait(*tasks)


async def until_one_ends(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait until one of another owner's tasks has ended, and raise what it raised; for ever where there is none."""
    waited_for = list(tasks)
    if not waited_for:
        await asyncio.get_running_loop().create_future()
    done, _ = await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()

"""`StandingWatch` ends streams whose credential has lost its standing: it was revoked or narrowed, or has expired.

A request shows its credential and is over soon. A stream shows it once, and may go on for days. So every stream that is
served on a credential is followed here: its check is made again each second, and at once when the keys have changed.
The check is the one that let the stream in, so revocation, expiry, rotation and changed rights all count. What ends the
stream is up to its owner, who waits for the future that `follow` gives.

A check of a key takes some 4 µs: a thousand streams cost 0.4 % of a core. Other work goes on between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self

import structlog

from tidegate import clock
from tidegate.outcome import ServeError
from tidegate.runtime.owned_task import OwnedTask

CHECK_S: Final = 1.0
_AT_ONCE: Final = 64  # checks between two turns of the loop
log = structlog.get_logger(__name__)

Check = Callable[[], Awaitable[object]]


class StandingWatch:
    """Follows the streams of one process; `async with` runs the checks."""

    def __init__(self) -> None:
        self._followed: dict[asyncio.Future[ServeError], Check] = {}
        self._wake = asyncio.Event()
        self._task = OwnedTask(
            self._run, name="standing of streams", crash_means="streams outlive their credentials from now on"
        )

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    @contextmanager
    def follow(self, check: Check) -> Iterator[asyncio.Future[ServeError]]:
        """A future that gets the refusal once `check` raises a ServeError; cancelled at the end of the context."""
        lapse: asyncio.Future[ServeError] = asyncio.get_running_loop().create_future()
        self._followed[lapse] = check
        try:
            yield lapse
        finally:
            del self._followed[lapse]
            lapse.cancel()

    def look_soon(self) -> None:
        """Credentials have changed: check all streams now."""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._wake.wait()
            self._wake.clear()
            for number, (lapse, check) in enumerate(tuple(self._followed.items()), 1):
                await _look(lapse, check)
                if number % _AT_ONCE == 0:
                    await clock.sleep(0.0)

    def __repr__(self) -> str:
        return f"<StandingWatch {len(self._followed)} streams>"


async def _look(lapse: asyncio.Future[ServeError], check: Check) -> None:
    if lapse.done():
        return
    try:
        await check()
    except ServeError as error:
        if not lapse.done():
            lapse.set_result(error.without_frames())
    except Exception:
        log.exception("a stream's credential cannot be checked")  # a defect must not keep the others from their check

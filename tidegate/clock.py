"""This is the one module that reads a clock or sleeps.

`now()` is the monotonic clock in production and virtual time under `tests/support/loop.py`. Code that decides takes
`now` as an argument instead. It shares its timeline with the event loop's own clock (`loop.call_at` takes these
instants) but not its resolution: uvloop's clock stands still for a whole loop iteration and counts milliseconds, which
is longer than a LAN's round trip. Wall-clock time (`utc_s`) is for people and for epochs only; it never orders events.

Worker processes read the clock and have no loop: asyncio, which takes 10 MB of memory, is imported where a loop sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import floor

_read: Callable[[], float] = time.monotonic


def now() -> float:
    """Monotonic seconds."""
    return _read()


@contextmanager
def reading(source: Callable[[], float]) -> Iterator[None]:
    """For the duration, `now()` reads `source`: how a virtual-time loop puts its own time in place of the machine's."""
    global _read
    before, _read = _read, source
    try:
        yield
    finally:
        _read = before


def utc_s() -> float:
    """Wall-clock seconds since 1970; may jump, and may be 1970 on a device without a clock battery."""
    return time.time()


def block_until(instant: float) -> None:
    """Block this thread until an instant of `now()`, without using the CPU; for worker processes, never for a loop."""
    time.sleep(max(0.0, instant - now()))


async def sleep(delay_s: float) -> None:
    """Sleep on the loop's clock."""
    import asyncio

    await asyncio.sleep(delay_s)


async def sleep_until(instant: float) -> None:
    """Sleep until an instant of `now()`; returns at once when it has passed."""
    import asyncio

    await asyncio.sleep(max(0.0, instant - now()))


async def sleep_until_tick(period_s: float) -> None:
    """Sleep until the next multiple of a period: what looks once a second in one process wakes it once and not thrice.

    A loop's timer may ring a moment early; the tick that it rang for is over then.
    """
    await sleep_until((floor(now() / period_s + 0.1) + 1.0) * period_s)

"""The one place that reads a clock or sleeps.

`now()` is the running event loop's clock: the monotonic clock in production, virtual time under
`tests/support/loop.py`. Everything that decides takes `now` as an argument instead. Wall-clock time (`utc_s`) is for
people and for epochs only; it never orders events.
"""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Monotonic seconds, of the running event loop when there is one."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def utc_s() -> float:
    """Wall-clock seconds since 1970; may jump, and may be 1970 on a device without a clock battery."""
    return time.time()


async def sleep(delay_s: float) -> None:
    """Sleep on the loop's clock."""
    await asyncio.sleep(delay_s)


async def sleep_until(instant: float) -> None:
    """Sleep until an instant of `now()`; returns at once when it has passed."""
    await asyncio.sleep(max(0.0, instant - now()))

"""The reachability probe tries TCP connections until a lost gateway accepts one again.

A dial that began while the path dropped packets is of little use when the path is back: TCP sends its SYN again after
1, 3 and 7 s, and that dial takes as long. So plain connections are tried instead, one begun every `EVERY_S` with the
last few still open, and the first accepted one ends the wait; the dial that follows then finds an open path. A slow
path loses nothing by it: every try has `TRY_S` to succeed, however many began after it.

At most `MOST` tries are open, and random jitter spreads them, so that a fleet that lost its gateway does not connect in
step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tidegate import clock
from tidegate.runtime.owned_task import cancel_and_wait

EVERY_S: Final = 0.5  # on average; with the dial that follows, a device is back within a second
TRY_S: Final = 3.0
MOST: Final = 4


async def wait_until_open(address: str, draw: Callable[[], float]) -> None:
    """Return once HOST:PORT takes a connection."""
    host, _, port = address.rpartition(":")
    tries: set[asyncio.Task[bool]] = set()
    try:
        while True:
            if len(tries) < MOST:
                attempt = _try_connect(host.strip("[]"), int(port))
                tries.add(asyncio.create_task(attempt, name=f"reachability of {address}"))
            next_at = clock.now() + EVERY_S * (0.5 + draw())
            while tries and (left_s := next_at - clock.now()) > 0:
                done, tries = await asyncio.wait(tries, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if any(one.result() for one in done):
                    return
            await clock.sleep_until(next_at)
    finally:
        await cancel_and_wait(*tries)


async def _try_connect(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(TRY_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, OverflowError):  # a TimeoutError is an OSError too
        return False
    writer.close()
    return True

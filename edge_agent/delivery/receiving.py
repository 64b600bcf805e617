"""What a connection brings, taken off it at once, so that nothing is lost when it is cut.

aiohttp gives up what it has buffered when a connection ends early: up to a hundred kilobytes that were paid for and
would be fetched again after every cut. So a task reads whatever is there as soon as it is there, and whoever writes it
to a slow disk takes its time. Both ends are bounded: beyond AHEAD_BYTES the connection is left alone for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import aiohttp

from tidegate.runtime.owned_task import cancel_and_wait

AHEAD_BYTES: Final = 4 * 1024 * 1024


async def read_ahead(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """What comes, in pieces of any size; then the error that ended it, if one did. Close it when you stop early."""
    pieces: list[bytes] = []
    moved, taken = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        try:
            while piece := await stream.readany():
                pieces.append(piece)
                moved.set()
                while sum(map(len, pieces)) >= AHEAD_BYTES:
                    taken.clear()
                    await taken.wait()
        finally:
            moved.set()

    reading = asyncio.create_task(read(), name="read a download")
    try:
        while pieces or not reading.done():
            moved.clear()
            if not pieces and not reading.done():
                await moved.wait()
            if pieces:
                whole = b"".join(pieces)
                pieces.clear()
                taken.set()
                yield whole
        await reading
    finally:
        await cancel_and_wait(reading)

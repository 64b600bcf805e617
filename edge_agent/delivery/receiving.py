"""Reading ahead takes bytes off a connection as soon as they arrive, so that none are lost when it is cut.

aiohttp drops its buffer when a connection ends early: up to a hundred kilobytes that were paid for and would be fetched
again after every cut. So a task reads bytes as soon as they arrive, while a slow disk writes them in its own time. The
buffer is bounded: beyond AHEAD_BYTES the task stops reading for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import aiohttp

from tidegate.runtime.owned_task import cancel_and_wait

AHEAD_BYTES: Final = 4 * 1024 * 1024


async def read_ahead(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The stream's bytes in pieces of any size; then the error that ended it, if any. Close it to stop early."""
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

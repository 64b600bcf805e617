"""Reads the requests of a served gRPC stream until the stream ends, or until its server stops reading.

A read cannot be raced against an event without a task for each message, which every request would pay for. So one task
reads and another waits for the event, and the event cancels the read only between two requests: what has been read is
taken in either case, and what has not was never accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from tidegate.runtime.owned_task import cancel_and_wait


async def read_until(
    stop: asyncio.Event, requests: AsyncIterator[bytes], take: Callable[[bytes], Awaitable[None]]
) -> None:
    """Hand each request to `take`, in their order. What reading or taking raises comes through."""
    taking = False

    async def read() -> None:
        nonlocal taking
        async for raw in requests:
            taking = True
            await take(raw)
            taking = False
            if stop.is_set():
                return

    reading = asyncio.create_task(read(), name="oip-stream-reader")
    stopping = asyncio.create_task(stop.wait(), name="oip-stream-stop")
    try:
        await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if taking:
            await asyncio.wait((reading,))
        if reading.done():
            reading.result()
    finally:
        await cancel_and_wait(reading, stopping)

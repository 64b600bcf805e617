"""Decodes and encodes large bodies in threads beside the event loop, which would otherwise stand still meanwhile.

Twenty mebibytes of JSON take half a second to decode. A body of more than a mebibyte is therefore decoded and encoded
in a thread. Smaller ones are not: going there and back costs more than they do.

At most two run at once, and further ones wait in order: a body that is being decoded is held several times over. A
place is given back when its thread has ended, which a cancellation does not hasten: a caller that leaves must not make
room for more threads than there are places.

It can be better: each call into the decoder holds Python's lock until it returns, so the loop gets its turns between
such calls, not within them. For one list of 19 MiB the longest pause falls from 0.64 s to 0.25 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

LARGE_BYTES: Final = 2**20
PLACES: Final = 2
T = TypeVar("T")


class CodecThreads:
    """Mutable: the places. One per protocol of a server."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(PLACES)
        self._under_way = 0

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises: here, or in a thread if the bytes that it is about are many."""
        if size_bytes <= LARGE_BYTES:
            return work()
        await self._places.acquire()
        self._under_way += 1
        working = asyncio.get_running_loop().run_in_executor(None, work)
        working.add_done_callback(self._over)
        return await asyncio.shield(working)

    def _over(self, _working: asyncio.Future[T]) -> None:
        self._under_way -= 1
        self._places.release()

    def __repr__(self) -> str:
        return f"<CodecThreads {self._under_way} of {PLACES} places taken>"

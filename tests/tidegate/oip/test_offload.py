"""Large bodies are coded beside the loop: the loop goes on, places are bounded, and a cancellation frees none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from tests.support.loop import settle
from tidegate.oip.offload import LARGE_BYTES, PLACES, CodecThreads
from tidegate.outcome import InvalidRequest

LARGE = LARGE_BYTES + 1


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not true():
            await settle(1)


class Work:
    """Blocks its thread until it is let go, and counts how many do at a time."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.begun.release()
        assert self.go.wait(10.0), "nobody let it go"
        with self._lock:
            self._now -= 1
        return threading.get_ident()

    async def has_begun(self) -> None:
        await until(lambda: self.begun.acquire(blocking=False))


async def test_small_work_is_done_here() -> None:
    assert await CodecThreads().run(LARGE_BYTES, threading.get_ident) == threading.get_ident()


async def test_the_loop_goes_on_while_a_large_body_is_coded() -> None:
    aside, work = CodecThreads(), Work()
    coding = asyncio.create_task(aside.run(LARGE, work))
    await work.has_begun()
    turns = 0
    for _ in range(1000):  # each of them while the thread is blocked
        await settle(1)
        turns += not coding.done()
    assert repr(aside) == f"<CodecThreads 1 of {PLACES} places taken>"
    work.go.set()
    assert await coding != threading.get_ident()
    assert turns == 1000


async def test_there_are_no_more_threads_than_places_and_a_cancellation_frees_none() -> None:
    aside, work = CodecThreads(), Work()
    coding = [asyncio.create_task(aside.run(LARGE, work)) for _ in range(PLACES + 3)]
    for _ in range(PLACES):
        await work.has_begun()
    coding[0].cancel()
    coding[PLACES].cancel()  # one that waits for its place
    await asyncio.wait([coding[0], coding[PLACES]])
    assert repr(aside) == f"<CodecThreads {PLACES} of {PLACES} places taken>"
    work.go.set()
    await asyncio.gather(*coding, return_exceptions=True)
    await until(lambda: repr(aside) == f"<CodecThreads 0 of {PLACES} places taken>")
    assert work.most == PLACES


@pytest.mark.parametrize("size_bytes", [0, LARGE])
async def test_what_is_wrong_with_a_body_is_told_either_way(size_bytes: int) -> None:
    def wrong() -> None:
        raise InvalidRequest("no JSON")

    told: Callable[[], None] = wrong
    with pytest.raises(InvalidRequest, match="no JSON"):
        await CodecThreads().run(size_bytes, told)

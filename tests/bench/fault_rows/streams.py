"""Rows 33 to 37: what happens to answers that have begun when their target or its link fails in the middle.

    33 the answering edge is killed    34 it stands still for 3 s    35 its link is silent for 1 s (a), 5 s (b)
    36 a fifth of what it sends is lost, for 4 s, and nothing of what it is sent    37 a caller reads slowly

They have a stage of their own, which is that of `tests/bench/generate_resume.py`: three edges whose engines are paced,
each behind a simulated link, a gateway, and callers that read streams without pause. A row's fault comes so many times,
each in the middle of an answer. Its numbers are of the answers that were under way at the edge that was hit:

    answers        that were hit            resumed   that went on elsewhere
    lost           that ended with an error, or not at all
    wrong_tokens   of all answers of the row: those with a token lost, doubled or other than an undisturbed engine's
    gap_p50_ms     the longest time between two tokens of such an answer; its p99

A gap may be as long as detection (50 ms, 250 ms where nothing says that something failed), the longest prompt that may
have to be computed again, and 50 ms; its p99 twice that. Loss is no failure: lost segments are sent again, and what
comes within 250 ms makes no stall. So the bound there is that of a stall. A caller that reads slowly is no stall
either, and must not be felt by others.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final, Self

import aiohttp

from tests.bench.fault_rows.trial import Check
from tests.bench.generate_resume import (
    CHUNK,
    PREFILL_MS,
    PROMPT,
    STEP_MS,
    STREAMS,
    TOKENS,
    Answer,
    Caller,
    Edge,
    Expected,
    start,
    under_way,
)
from tidegate import clock
from tidegate.estimate.quantiles import nearest_rank
from tidegate.testing.links import LinkThread, SimLink

MODEL: Final = "talker"
_LEARN_S: Final = 5.0
_REST_S: Final = 2.5  # until what was hit is used again
_ENDS_WITHIN_S: Final = 20.0
_FAILED_MS, _SILENT_MS, _ALLOWED_MS = 50.0, 250.0, 50.0
_PAUSE_S: Final = 0.06  # between two lines that a slow caller reads: it takes some four times as long as the engine
_STOPPED_S, _LOSSY_S, _SLOWLY_S = 3.0, 4.0, 12.0
_LOST_SHARE: Final = 0.2


class SlowCaller(Caller):
    """Reads a line now and then."""

    async def pause(self) -> None:
        await clock.sleep(_PAUSE_S)


@dataclass(frozen=True)
class Hit:
    """The answers that were under way where a fault came."""

    target: str
    answers: Sequence[Answer]


Fault = Callable[["StreamStage", Edge], Awaitable[None]]


@dataclass(frozen=True)
class StreamRow:
    """A fault in the middle of answers. `fault` returns when it is over.

    Args:
        resumes: whether the answer has to go on elsewhere; with what is left of a link it may also come by itself.
        quick_hits: how often in the short bench.
    """

    number: str
    title: str
    fault: Fault
    detection_ms: float
    resumes: bool = True
    hits: int = 10
    quick_hits: int = 2


class StreamStage:
    """Everything that runs, inside `async with`."""

    def __init__(self, scratch: Path) -> None:
        self.links: dict[str, SimLink] = {}
        self.callers: list[Caller] = []
        self.edges: dict[str, Edge] = {}
        self._scratch = scratch
        self._stack = AsyncExitStack()
        self._stop = asyncio.Event()
        self._chance = random.Random(33)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._scratch.mkdir(parents=True, exist_ok=True)
            thread = LinkThread()
            stack.callback(thread.close)

            def via(name: str, address: str) -> str:
                link = self.links[name] = thread.link(address, name=name, delay_ms=2)
                return link.address

            self.edges, address = await start(stack, self._scratch, via)
            expected = Expected(self._scratch / "expected")
            url = f"{address}/v2/models/{MODEL}/generate_stream"
            self.callers = [Caller(number, url, expected) for number in range(STREAMS)]
            self._slow = SlowCaller(STREAMS, url, expected)
            timeout = aiohttp.ClientTimeout(total=60.0)
            self._session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            running = [asyncio.create_task(one.run(self._session, self._stop)) for one in self.callers]
            stack.push_async_callback(self._end, running)
            await clock.sleep(_LEARN_S)  # usual gaps are known by then
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, row: StreamRow, hits: int) -> list[Check]:
        """So many faults, and the row's numbers."""
        ended = [len(one.ended) for one in self.callers]
        found = [await self._hit(row) for _ in range(hits)]
        after = [pair for one, count in zip(self.callers, ended, strict=True) for pair in one.ended[count:]]
        return list(_checks(row, found, after))

    async def read_slowly(self) -> list[Check]:
        """Row 37: one caller more, which reads slowly."""
        ended = [len(one.ended) for one in self.callers]
        stop = asyncio.Event()
        slow = asyncio.create_task(self._slow.run(self._session, stop))
        await clock.sleep(_SLOWLY_S)
        stop.set()
        await slow
        others = [pair for one, count in zip(self.callers, ended, strict=True) for pair in one.ended[count:]]
        return list(_checks_slowly(self._slow.ended, others))

    async def _hit(self, row: StreamRow) -> Hit:
        target, met = await under_way(self.edges, self.callers, self._chance)
        await row.fault(self, self.edges[target])
        give_up_at = clock.now() + _ENDS_WITHIN_S
        while any(answer is caller.now for caller, answer in met) and clock.now() < give_up_at:
            await clock.sleep(0.02)
        for caller, answer in met:
            if answer is caller.now:
                answer.error = f"no end within {_ENDS_WITHIN_S:g} s"
        await clock.sleep(_REST_S)
        return Hit(target, [answer for _, answer in met])

    async def _end(self, running: Iterable[asyncio.Task[None]]) -> None:
        self._stop.set()
        await asyncio.gather(*running)

    def __repr__(self) -> str:
        return f"<StreamStage {len(self.edges)} edges, {len(self.callers)} callers>"


def _checks(row: StreamRow, found: Sequence[Hit], ended: Sequence[tuple[Answer, bool]]) -> Iterable[Check]:
    answers = [one for hit in found for one in hit.answers]
    gaps = sorted(1e3 * one.gap_s for one in answers if not one.error) or [0.0]
    # The longest that may have to be computed again: all answers of the edge, at their ends, on one other.
    most_tokens = max((len(hit.answers) for hit in found), default=1) * (PROMPT + TOKENS)
    allowed_ms = row.detection_ms + most_tokens * PREFILL_MS + ceil(most_tokens / CHUNK) * STEP_MS + _ALLOWED_MS
    yield Check("answers_hit", len(answers), ">=", len(found))
    if row.resumes:  # of the others some may have been at their ends
        yield Check("resumed", sum(bool(one.resumed) for one in answers), ">=", len(found))
    yield Check("lost", sum(bool(one.error) for one in answers), "<=", 0)
    yield Check("wrong_tokens", _wrong(ended), "<=", 0)
    yield Check("gap_p50_ms", round(nearest_rank(gaps, 0.5), 1), "<=", round(allowed_ms, 1))
    yield Check("gap_p99_ms", round(nearest_rank(gaps, 0.99), 1), "<=", round(2.0 * allowed_ms, 1))


def _checks_slowly(slow: Sequence[tuple[Answer, bool]], others: Sequence[tuple[Answer, bool]]) -> Iterable[Check]:
    gaps = sorted(1e3 * one.gap_s for one, _ in others if not one.error) or [0.0]
    yield Check("answers_read_slowly", len(slow), ">=", 1)
    yield Check("resumed", sum(bool(one.resumed) for one, _ in slow), "<=", 0)
    yield Check("lost", sum(bool(one.error) for one, _ in [*slow, *others]), "<=", 0)
    yield Check("wrong_tokens", _wrong([*slow, *others]), "<=", 0)
    yield Check("others_gap_p50_ms", round(nearest_rank(gaps, 0.5), 1), "<=", _SILENT_MS)
    yield Check("others_gap_p99_ms", round(nearest_rank(gaps, 0.99), 1), "<=", 2.0 * _SILENT_MS)


def _wrong(ended: Sequence[tuple[Answer, bool]]) -> int:
    return sum(not right and not one.error for one, right in ended)


async def _kill(_stage: StreamStage, edge: Edge) -> None:
    edge.hit("edge")
    await edge.again()


async def _stop(_stage: StreamStage, edge: Edge) -> None:
    edge.hit("stopped")
    await clock.sleep(_STOPPED_S)
    assert edge.child is not None
    edge.child.signal(signal.SIGCONT)


def _silent(for_s: float) -> Fault:
    async def fault(stage: StreamStage, edge: Edge) -> None:
        stage.links[edge.name].partition()
        await clock.sleep(for_s)
        stage.links[edge.name].heal()

    return fault


async def _lossy(stage: StreamStage, edge: Edge) -> None:
    stage.links[edge.name].toxic("lossy", "from", delay_ms=0, loss=_LOST_SHARE)
    await clock.sleep(_LOSSY_S)
    stage.links[edge.name].remove("lossy")


SLOW_READER: Final = "37"
SLOW_READER_TITLE: Final = "a caller reads its stream slowly"
STREAM_ROWS: Final = (
    StreamRow("33", "the answering edge is killed in the middle of a stream", _kill, _FAILED_MS),
    StreamRow("34", "the answering edge stands still for 3 s", _stop, _SILENT_MS),
    StreamRow("35a", "its link is silent for 1 s", _silent(1.0), _SILENT_MS),
    StreamRow("35b", "its link is silent for 5 s", _silent(5.0), _SILENT_MS, hits=5, quick_hits=1),
    StreamRow("36", "a fifth of what it sends is lost for 4 s", _lossy, _SILENT_MS, resumes=False),
)

"""Races to the first token between real edges: one of the two is stopped, the other one's tokens are the answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.core.history.recorder import RequestRecord
from tests.support.gateway.app import until
from tests.support.gateway.edge_pair import EdgePair, edge_pair
from tests.support.gateway.text_gateway import text_repository
from tests.support.lost_time import LostTime
from tidegate import clock

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

HELLO: Any = [{"role": "user", "content": "when does the tide come in?"}]
TOKENS = 24
STEP_MS = 15.0
FIRST_MS = 400  # a stopped worker is found out after 500, and what it had goes elsewhere then
TRIES = 20  # either edge may be asked first; only where it is the stopped one there is a race


def sdk(one: EdgePair) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{one.gateway.addresses['http']}/v1", api_key="any", max_retries=0)


def latest(one: EdgePair) -> RequestRecord:
    return next(reversed(one.gateway.dispatcher.recorder))


@contextmanager
def stopped(one: EdgePair, target: str) -> Iterator[None]:
    pid = one.worker(target)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def text_of(client: openai.AsyncOpenAI, **more: Any) -> tuple[str, int, Any]:
    """A streamed answer: its text, how many tokens it had, and the last event's words."""
    stream = await client.chat.completions.create(
        model="talker",
        messages=HELLO,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"tidegate-ttft-ms": str(FIRST_MS)},
        **more,
    )
    said, usage, ended = "", None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices:
            said += chunk.choices[0].delta.content or ""
            ended = chunk
    assert usage is not None and ended is not None
    return said, usage.completion_tokens, ended.model_extra["tidegate"]


async def raced(
    one: EdgePair, client: openai.AsyncOpenAI, whole: str, reason: str = "race"
) -> tuple[RequestRecord, Any]:
    """Stop the edge that answered last, and ask, until one that is stopped was asked first and another beside it."""
    words = {"tidegate-served-by": "edge/a"}
    for _ in range(TRIES):
        silent = words["tidegate-served-by"]
        with stopped(one, silent):
            said, tokens, words = await text_of(client)
        assert (said, tokens) == (whole, TOKENS), "no token of a loser is shown, and none comes twice"
        record = latest(one)
        if record.reasons[1:] == (reason,) and record.tried()[0] == silent:  # not one that a busy machine kept silent
            return record, words
        await until(lambda: one.busy == [])
    raise AssertionError(f"no {reason} was seen")


async def test_the_first_token_of_the_other_edge_wins_and_the_loser_is_let_go(tmp_path: Path) -> None:
    models = await asyncio.to_thread(text_repository, tmp_path, step_ms=STEP_MS)
    async with edge_pair(tmp_path, models, first_token_race=True) as one, sdk(one) as client:
        whole, tokens, _ = await text_of(client)
        assert tokens == TOKENS
        record, words = await raced(one, client, whole)
        assert words["tidegate-served-by"] == record.tried()[1]
        assert words["tidegate-route"].startswith("race;") and "attempts=2; hedged=1" in words["tidegate-route"]
        events = [(note.what, note.attempt) for note in record.notes if note.what in ("begun", "cancelled", "answered")]
        assert events == [("begun", 1), ("cancelled", 0), ("answered", 1)]
        assert record.decision is not None and record.decision.ask.generation is not None
        assert record.wasted_tokens >= record.decision.ask.generation.prompt_tokens
        await until(lambda: one.busy == [])
        await until(lambda: one.gateway.admission.in_flight == 0)

        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{one.gateway.addresses['admin']}/debug/decisions?hedged=1") as response,
        ):
            (explained,) = (await response.json())["decisions"]
        assert explained["wasted_tokens"] == record.wasted_tokens
        assert [event["reason"] for event in explained["events"] if event["what"] == "launched"][1] == "race"


async def test_the_losers_slot_is_free_after_a_round_trip_and_two_steps(tmp_path: Path) -> None:
    models = await asyncio.to_thread(text_repository, tmp_path, step_ms=STEP_MS)
    async with edge_pair(tmp_path, models, first_token_race=True) as one, sdk(one) as client:
        whole, _, _ = await text_of(client)
        seen: list[tuple[float, float, list[str]]] = []

        async def watch() -> None:
            while True:
                seen.append((clock.now(), lost.s, one.busy))
                await clock.sleep(0.002)

        async with LostTime() as lost:
            watching = asyncio.create_task(watch())
            record, _ = await raced(one, client, whole)
            watching.cancel()
        begun_at = next(note.at for note in record.notes if note.what == "begun")
        loser = record.tried()[0]
        lost_before_s = max(lost_s for at, lost_s, _ in seen if at <= begun_at)
        freed_at, lost_s = next((at, lost_s) for at, lost_s, busy in seen if at > begun_at and loser not in busy)
        # Two steps are 30 ms; the rest is for a machine that does other work as well.
        assert freed_at - begun_at - (lost_s - lost_before_s) < 2 * STEP_MS / 1e3 + 0.1


async def test_without_the_switch_nothing_is_asked_beside_a_good_bet(tmp_path: Path) -> None:
    models = await asyncio.to_thread(text_repository, tmp_path, step_ms=STEP_MS)
    async with edge_pair(tmp_path, models) as one, sdk(one) as client:
        whole, _, _ = await text_of(client)
        _, words = await raced(one, client, whole, "hedge")
        assert words["tidegate-route"].startswith("hedge;")

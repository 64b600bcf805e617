"""The sequence meter tells the time of a reader from that of the engine."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.generate.token_stream import TokenStream
from tidegate.outcome import DeadlineExceeded
from tidegate.serving.generation.sequence_meter import READER_PATIENCE_S, SequenceMeter
from tidegate.token_sink import MAX_WINDOW, TokenBatch


def tokens(first: int, count: int) -> TokenBatch:
    return TokenBatch(first, tuple(range(count)))


@on_virtual_time
async def test_time_is_the_readers_from_when_its_window_is_full_until_it_reads() -> None:
    stream, credits = TokenStream(window=4), list[int]()
    meter = SequenceMeter(stream, 100)
    meter.on_credit(credits.append)
    meter.started(7, 2)
    assert (stream.prompt_tokens, stream.cached_tokens, meter.window) == (7, 2, 4)

    await clock.sleep(1.0)
    meter.put(tokens(0, 3))
    await clock.sleep(1.0)  # there is room for one more: this second is the engine's
    assert meter.first_at == clock.now() - 1.0
    meter.put(tokens(3, 1))
    await clock.sleep(2.0)
    assert meter.paused_s(clock.now()) == 2.0
    await stream.take()
    assert credits == [4]
    await clock.sleep(5.0)
    assert (meter.paused_s(clock.now()), meter.tokens) == (2.0, 4)


@on_virtual_time
async def test_the_last_token_leaves_nothing_to_wait_for() -> None:
    meter = SequenceMeter(TokenStream(window=4), 4)
    meter.put(tokens(0, 4))
    await clock.sleep(3.0)
    assert meter.paused_s(clock.now()) == 0.0


@on_virtual_time
async def test_without_a_reader_credit_comes_with_each_token() -> None:
    credits = list[int]()
    meter = SequenceMeter(None, 10**6)
    meter.on_credit(credits.append)
    meter.started(1, 0)
    meter.put(tokens(0, 5))
    assert credits == [5] and meter.window == MAX_WINDOW and meter.paused_s(clock.now()) == 0.0


@on_virtual_time
async def test_a_reader_that_has_gone_loses_its_slot_and_one_that_comes_back_does_not() -> None:
    stream = TokenStream(window=4)
    meter = SequenceMeter(stream, 100)
    meter.on_credit(lambda _tokens: None)

    with pytest.raises(DeadlineExceeded, match="none of its tokens was read for 60 s"):
        async with meter.reading():
            meter.put(tokens(0, 4))
            await clock.sleep(READER_PATIENCE_S - 1.0)
            await stream.take()
            meter.put(tokens(4, 4))
            await clock.sleep(READER_PATIENCE_S - 1.0)
            assert meter.paused_s(clock.now()) == 2 * (READER_PATIENCE_S - 1.0)
            await clock.sleep(2.0)
    assert asyncio.get_running_loop().timers == []  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match="another"):
        async with meter.reading():
            raise TimeoutError("another")

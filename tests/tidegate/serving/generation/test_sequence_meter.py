"""The sequence meter tells the time of a reader from that of the engine."""

from __future__ import annotations

from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.generate.token_stream import TokenStream
from tidegate.serving.generation.sequence_meter import SequenceMeter
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

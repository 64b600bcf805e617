"""The reader of a stream gets every token once, and gives credit for what it has read."""

from __future__ import annotations

import asyncio

from tidegate import clock
from tidegate.generate.token_stream import TokenStream
from tidegate.token_sink import TokenBatch


async def test_a_reader_gets_all_that_has_come_and_waits_for_the_rest() -> None:
    stream = TokenStream()
    stream.put(TokenBatch(0, (1, 2)))
    stream.put(TokenBatch(2, (3,)))
    assert [batch.ids for batch in await stream.take()] == [(1, 2), (3,)]
    waiting = asyncio.create_task(stream.take())
    await clock.sleep(0)
    assert not waiting.done()
    stream.put(TokenBatch(3, (4,)))
    assert (await waiting)[0].ids == (4,)
    stream.put(TokenBatch(4, (5,)))
    stream.end()
    assert [batch.first for batch in await stream.take()] == [4]
    assert await stream.take() == [] == await stream.take()


async def test_credit_is_given_for_what_was_read_and_for_nothing_else() -> None:
    credits: list[int] = []
    stream = TokenStream(window=8)
    stream.on_credit(credits.append)
    for index in range(8):
        stream.put(TokenBatch(index, (index,)))
    assert credits == []
    await stream.take()
    assert credits == [8]
    stream.put(TokenBatch(8, (8,)))
    await stream.take()
    assert credits == [8]  # a quarter of a window at a time
    stream.put(TokenBatch(9, (9,)))
    await stream.take()
    assert credits == [8, 2]


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    stream = TokenStream()
    waiting = asyncio.create_task(stream.take())
    await clock.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    stream.put(TokenBatch(0, (1,)))
    assert [batch.ids for batch in await stream.take()] == [(1,)]


async def test_a_reader_that_is_called_is_called_once_for_all_that_came_in_a_turn() -> None:
    stream, read = TokenStream(window=8), list[list[int]]()
    stream.put(TokenBatch(0, (1,)))
    stream.on_ready(lambda: read.append([batch.ids[0] for batch in stream.taken()]))
    stream.put(TokenBatch(1, (2,)))
    assert read == []
    await clock.sleep(0)
    assert read == [[1, 2]]
    stream.put(TokenBatch(2, (3,)))
    await clock.sleep(0)
    stream.end()
    await clock.sleep(0)
    assert (read, stream.has_ended) == ([[1, 2], [3], []], True)


async def test_credit_is_given_to_a_reader_that_is_called_as_to_one_that_waits() -> None:
    credits: list[int] = []
    stream = TokenStream(window=8)
    stream.on_credit(credits.append)
    read = list[TokenBatch]()
    stream.on_ready(lambda: read.extend(stream.taken()))
    for index in range(6):
        stream.put(TokenBatch(index, (index,)))
        await clock.sleep(0)
    assert (credits, len(read)) == ([2, 2, 2], 6)


async def test_a_reader_that_is_called_no_more_can_wait_for_the_rest() -> None:
    stream, called = TokenStream(), list[int]()
    stream.on_ready(lambda: called.append(1))
    stream.on_ready(None)
    waiting = asyncio.create_task(stream.take())
    await clock.sleep(0)
    stream.put(TokenBatch(0, (1,)))
    assert ([batch.ids for batch in await waiting], called) == ([(1,)], [])

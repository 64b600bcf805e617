"""What one stream holds: sizes, requests under way, room to wait for, and a side that never reads."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.loop import on_virtual_time, settle
from tests.support.serving.duplex import stream_pair
from tests.support.serving.link_pair import Pair, running, tensor_of
from tidegate.link import frames
from tidegate.link.frames import Greeting
from tidegate.link.outbox import Outbox
from tidegate.outcome import DeadlineExceeded, Overloaded, TooLarge, Unreachable
from tidegate.rpc import link_pb2


@on_virtual_time
async def test_a_request_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with running() as pair:
        with pytest.raises(TooLarge):
            await pair.ask(bytes(5001))


@on_virtual_time
async def test_a_request_that_is_too_large_for_the_other_side_is_refused_at_its_announcement() -> None:
    async with running(max_message_bytes=1000, outbox=Outbox(chunk_bytes=64)) as pair:
        with pytest.raises(TooLarge, match="at most 1000"):
            await pair.ask(bytes(3000))

        await pair.ask(b"and the stream goes on")
        sent = sum(len(raw) for raw in pair.asking.outbound.written)
        assert sent < 2000, "the rest of it was not sent"


@on_virtual_time
async def test_an_answer_that_is_too_large_fails_its_request_alone() -> None:
    async with running() as pair:
        pair.host.answer_bytes = 100_000
        with pytest.raises(TooLarge, match="at most 5000"):
            await pair.ask()

        pair.host.answer_bytes = 1
        await pair.ask()


@on_virtual_time
async def test_no_more_requests_are_under_way_than_a_stream_may_have() -> None:
    async with running(max_concurrent=2) as pair:
        pair.host.gate.clear()
        asking = [asyncio.create_task(pair.ask()) for _ in range(3)]

        with pytest.raises(Overloaded):
            await asking[2]

        pair.host.gate.set()
        await asyncio.gather(*asking[:2])
        await pair.ask()


@on_virtual_time
async def test_requests_that_never_come_whole_are_under_way_as_well() -> None:
    async with running(max_concurrent=2) as pair:
        for id in (11, 12):
            announced = frames.request(id, b"", budget_s=9.0, priority=0, variant="", traceparent="", chunked_bytes=1)
            pair.answering.inbound.messages.put_nowait(announced)
        await settle()

        pair.answering.inbound.messages.put_nowait(
            frames.request(13, b"", budget_s=9.0, priority=0, variant="", traceparent="", chunked_bytes=1)
        )
        await settle()

        assert b"2 requests of this stream are under way" in b"".join(pair.answering.outbound.written)


@on_virtual_time
async def test_questions_wait_for_room_in_turn_and_only_as_long_as_their_budget() -> None:
    async with running(outbox=Outbox(room_bytes=1, chunk_bytes=64)) as pair:
        pair.asking.outbound.stuck = True
        first = asyncio.create_task(pair.ask(b"one"))
        await settle()
        second = asyncio.create_task(pair.ask(b"two"))  # the first is being written; this one fills the outbox
        await settle()
        with pytest.raises(DeadlineExceeded, match="no room"):
            await pair.ask(b"three", budget_s=0.5)
        assert "three" not in repr(pair.host.calls)

        pair.asking.inbound.lose("gone")

        for task in (first, second):
            with pytest.raises(Unreachable, match="gone"):
                await task


@on_virtual_time
async def test_a_wait_for_room_ends_as_the_link_drains() -> None:
    async with running(outbox=Outbox(room_bytes=1)) as pair:
        answers = await asyncio.gather(*[pair.ask(b"%d" % number) for number in range(20)])

        assert [tensor_of(answered) for answered in answers] == [b"%d" % number for number in range(20)]


@on_virtual_time
async def test_a_wait_for_room_fails_when_the_stream_ends() -> None:
    async with running(outbox=Outbox(room_bytes=1)) as pair:
        pair.asking.outbound.stuck = True
        asking = [asyncio.create_task(pair.ask()) for _ in range(4)]
        await settle()

        pair.asking.inbound.lose("gone")

        for task in asking:
            with pytest.raises(Unreachable, match="gone"):
                await task


@pytest.mark.slow
@on_virtual_time
async def test_a_side_that_asks_and_never_reads_is_hung_up_on() -> None:
    ours, theirs = stream_pair()
    service = Pair().service
    theirs.inbound.stuck = True
    refused = b"".join(
        link_pb2.Envelope(frames=[{"request": {"id": id, "message": b"\xff"}}]).SerializeToString()
        for id in range(1, frames.MAX_FRAMES)
    )

    await theirs.write(frames.hello(Greeting("gateway/test", 0, "0")))
    await theirs.write(refused)

    assert await service.serve(ours) == "the other side sends and does not read"

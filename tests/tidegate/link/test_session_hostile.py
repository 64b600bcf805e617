"""Hostile frames, each against the side that would read it."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.loop import on_virtual_time, settle
from tests.support.serving.duplex import stream_pair
from tests.support.serving.link_pair import Pair, running, tensor_of
from tidegate.link import frames
from tidegate.link.frames import AnswerFrame, Greeting
from tidegate.outcome import BadAnswer, Unreachable
from tidegate.rpc import link_pb2
from tidegate.types import Accepted, LoadReport

HELLO = frames.hello(Greeting("gateway/test", 0, "0"))
REQUEST = frames.request(1, b"", budget_s=9.0, priority=0, variant="", traceparent="", chunked_bytes=500)


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        (frames.chunk(1, b"x"), "a chunk of request 1, which was not announced"),
        (REQUEST + frames.chunk(1, bytes(501)), "do not fit the 500 bytes announced"),
        (REQUEST + REQUEST, "request 1 announced twice"),
        (REQUEST.replace(b"\x08\x01", b"\x08\x00", 1), "request 0 announced twice"),
        (frames.answer(1, AnswerFrame(b"", 0.0, 0.0, 1, "", None)), "an answer frame, which this side does not take"),
    ],
)
def test_a_server_hangs_up_on_frames_that_no_client_sends(envelope: bytes, words: str) -> None:
    @on_virtual_time
    async def scenario() -> None:
        ours, theirs = stream_pair()
        service = Pair().service

        await theirs.write(HELLO + envelope)

        assert words.replace("an answer", "a answer") in await service.serve(ours)
        assert (service.streams, service.under_way) == (0, 0)

    scenario()


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        (frames.accepted(99, Accepted(0, 0.0)), "request 99, which was never sent"),
        (frames.chunk(99, b"x"), "request 99, which was never sent"),
        (frames.answer(0, AnswerFrame(b"", 0.0, 0.0, 1, "", None)), "request 0, which was never sent"),
        (frames.refused(99, BadAnswer("x"), None), "request 99, which was never sent"),
        (frames.chunk(1, b"x"), "a chunk of answer 1, which was not announced"),
        (frames.evidence(b"x"), "evidence that nobody asked for"),
        (frames.load(LoadReport(1, 1, 0, 0, 0.0), b"[oops"), "offers that cannot be read"),
        (2 * frames.answer(1, AnswerFrame(b"", 0, 0, 1, "", None), chunked_bytes=9), "message 1 announced twice"),
        (
            frames.answer(1, AnswerFrame(b"", 0, 0, 1, "", None), chunked_bytes=9) + frames.chunk(1, bytes(10)),
            "do not fit the 9 bytes announced",
        ),
    ],
)
def test_a_client_hangs_up_on_frames_that_no_server_sends(envelope: bytes, words: str) -> None:
    @on_virtual_time
    async def scenario() -> None:
        async with running() as pair:
            pair.host.gate.clear()
            asking = asyncio.create_task(pair.ask())
            await pair.host.begun.acquire()

            pair.asking.inbound.messages.put_nowait(envelope)

            with pytest.raises(Unreachable, match=words):
                await asking
            assert words in await pair.ends[0]
            assert pair.client.pending == 0

    scenario()


@on_virtual_time
async def test_announcing_more_than_may_be_incomplete_is_refused_and_the_stream_goes_on() -> None:
    async with running(max_message_bytes=1000) as pair:
        for id in range(1001, 1006):
            announced = frames.request(
                id, b"", budget_s=9.0, priority=0, variant="", traceparent="", chunked_bytes=1000
            )
            pair.answering.inbound.messages.put_nowait(announced)
        await settle()

        refused = [
            frame.refused
            for raw in pair.answering.outbound.written
            for frame in frames.parse(raw)
            if frame.WhichOneof("kind") == "refused"
        ]
        assert [(refusal.id, refusal.code) for refusal in refused] == [(1005, "overloaded")]
        assert not pair.ends[1].done()


@on_virtual_time
async def test_chunks_of_a_message_that_was_given_up_and_frames_of_a_newer_protocol_are_ignored() -> None:
    async with running() as pair:
        pair.answering.inbound.messages.put_nowait(
            frames.request(50, b"", budget_s=9.0, priority=0, variant="", traceparent="", chunked_bytes=10)
            + frames.chunk(50, b"12345")
            + frames.cancel(50)
            + frames.cancel(51)
            + frames.chunk(50, b"67890")
            + link_pb2.Envelope(frames=[link_pb2.Frame()]).SerializeToString()
        )

        assert tensor_of(await pair.ask()) == b"abc"
        assert len(pair.host.calls) == 1


@on_virtual_time
async def test_a_large_answer_nobody_waits_for_any_more_is_not_sent_to_its_end() -> None:
    async with running(client_max_bytes=10**8) as pair:
        pair.host.answer_bytes = 50_000_000
        asking = asyncio.create_task(pair.ask())
        await pair.host.left.acquire()
        await settle(20)

        asking.cancel()

        with pytest.raises(asyncio.CancelledError):
            await asking
        pair.host.answer_bytes = 1
        await pair.ask()
        assert sum(map(len, pair.answering.outbound.written)) < 10_000_000

"""Tokens over one stream, on virtual time: in order, with credit, and only between two sides that know them."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.loop import on_virtual_time, settle
from tests.support.serving.link_pair import question, running, tensor_of
from tests.support.serving.talking_host import TalkingHost
from tidegate import clock
from tidegate.generate.token_stream import TokenStream
from tidegate.link import frames
from tidegate.link.frames import ProtocolViolation
from tidegate.outcome import BadAnswer, Disconnected, NotSupported, Overloaded
from tidegate.rpc import link_pb2
from tidegate.token_sink import TokenBatch, TopLogprob


async def read_all(stream: TokenStream) -> list[int]:
    ids: list[int] = []
    while batches := await stream.take():
        ids += [id for batch in batches for id in batch.ids]
    return ids


@on_virtual_time
async def test_tokens_come_before_the_answer_and_each_once() -> None:
    host = TalkingHost()
    async with running(host=host) as pair:
        host.count, stream = 40, TokenStream()
        reading = asyncio.create_task(read_all(stream))

        answered = await pair.ask(b"hello", tokens=stream)
        stream.end()

        assert await reading == list(range(1000, 1040))
        assert tensor_of(answered) == b"hello"
        assert (stream.prompt_tokens, stream.cached_tokens) == (31, 24)


@on_virtual_time
async def test_tokens_that_are_ready_together_travel_in_one_envelope() -> None:
    host = TalkingHost()
    async with running(host=host) as pair:
        host.count, host.every_s = 1, 0.01
        streams = [TokenStream() for _ in range(50)]
        host.gate.clear()
        asking = [asyncio.create_task(pair.ask(tokens=stream)) for stream in streams]
        await settle(20)
        before = len(pair.answering.outbound.written)

        await clock.sleep(0.011)
        await settle(20)

        assert host.said == 50
        assert len(pair.answering.outbound.written) <= before + 2  # the tokens, and the acks of the answers
        host.gate.set()
        await asyncio.gather(*asking)


@on_virtual_time
async def test_a_reader_that_stalls_pauses_its_own_stream_and_nobody_elses() -> None:
    host = TalkingHost()
    async with running(host=host) as pair:
        host.count = 100
        stalled, read = TokenStream(window=8), TokenStream(window=8)
        waiting = asyncio.create_task(pair.ask(tokens=stalled))
        reading = asyncio.create_task(read_all(read))

        await pair.ask(tokens=read)
        read.end()
        await clock.sleep(5.0)

        assert len(await reading) == 100
        assert host.said == 108, "the other one has said what there was credit for"
        reading = asyncio.create_task(read_all(stalled))
        await waiting
        stalled.end()
        assert len(await reading) == 100


@on_virtual_time
async def test_a_caller_that_leaves_ends_the_work_and_frees_everything() -> None:
    host = TalkingHost()
    async with running(host=host) as pair:
        host.count, stream = 1000, TokenStream()
        waiting = asyncio.create_task(pair.ask(tokens=stream))
        await clock.sleep(0.055)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await settle(20)
        said = host.said

        await clock.sleep(1.0)

        assert host.said == said == 5
        assert pair.client.pending == pair.service.under_way == 0


@on_virtual_time
async def test_a_stream_that_breaks_off_says_why_after_what_it_had_said() -> None:
    host = TalkingHost()
    async with running(host=host) as pair:
        host.breaks_at, host.error, stream = 3, Overloaded("out of memory"), TokenStream()

        with pytest.raises(Overloaded, match="out of memory"):
            await pair.ask(tokens=stream)
        stream.end()

        assert await read_all(stream) == [1000, 1001, 1002]


@on_virtual_time
async def test_a_lost_link_ends_the_stream() -> None:
    host = TalkingHost()
    async with running(host=host) as pair:
        host.count, stream = 1000, TokenStream()
        waiting = asyncio.create_task(pair.ask(tokens=stream))
        await clock.sleep(0.055)
        pair.ends[1].cancel()

        with pytest.raises(Disconnected):
            await waiting


@on_virtual_time
async def test_an_older_target_is_not_asked_for_tokens() -> None:
    async with running(client_protocol=1) as pair:
        with pytest.raises(NotSupported, match="link protocol 1"):
            await pair.ask(tokens=TokenStream())
        assert tensor_of(await pair.ask(b"abc")) == b"abc", "and answers what it knows"


@on_virtual_time
async def test_an_older_gateway_is_sent_no_tokens() -> None:
    host = TalkingHost()
    async with running(host=host, client_protocol=1) as pair:
        asked = frames.request(1, question().message, budget_s=1.0, priority=0, variant="", traceparent="", window=8)
        await pair.asking.write(asked)
        await settle(20)

        assert host.calls[0].tokens is None


@on_virtual_time
async def test_objectives_travel_as_what_is_left_of_them() -> None:
    host = TalkingHost()
    async with running(host=host) as pair:
        stream, now = TokenStream(), clock.now()
        asked = question(tokens=stream)._replace(first_by=now + 0.5, next_s=0.04)
        await pair.client.ask(asked)
        late = question(tokens=TokenStream())._replace(first_by=now - 1.0)
        await pair.client.ask(late)
        await pair.client.ask(question(tokens=TokenStream()))

    first, second, third = host.calls
    assert first.ttft_s == pytest.approx(now + 0.5 - first.arrived_at, abs=1e-3) and first.tpot_s == 0.04
    assert second.ttft_s == pytest.approx(1e-6) and second.tpot_s is None
    assert third.ttft_s is None


@on_virtual_time
async def test_an_older_target_is_told_no_objectives() -> None:
    host = TalkingHost()
    async with running(host=host, client_protocol=1) as pair:
        await pair.client.ask(question()._replace(first_by=clock.now() + 0.5, next_s=0.04))

    assert host.calls[0].ttft_s is None and host.calls[0].tpot_s is None


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ([(5, (1,))], BadAnswer, "token 5 came where 0"),
        ([(0, (1, 2)), (1, (3,))], BadAnswer, "token 1 came where 2"),
        ([(0, tuple(range(9)))], BadAnswer, "9 tokens came, with credit for 8"),
    ],
)
def test_tokens_that_are_no_continuation_end_their_generation_only(
    said: list[tuple[int, tuple[int, ...]]], error: type[Exception], words: str
) -> None:
    @on_virtual_time
    async def scenario() -> None:
        host = TalkingHost()
        async with running(host=host) as pair:
            host.gate.clear()
            host.count = 0
            waiting = asyncio.create_task(pair.ask(tokens=TokenStream(window=8)))
            other = asyncio.create_task(pair.ask(b"other"))
            await settle(20)
            await pair.answering.write(frames.tokens([(1, TokenBatch(first, ids)) for first, ids in said]))

            with pytest.raises(error, match=words):
                await waiting
            host.gate.set()
            assert tensor_of(await other) == b"other"
            assert host.cancelled == 1

    scenario()


@pytest.mark.parametrize(
    ("ids", "logprobs", "places"), [([], [], 0), ([1, 2], [0.5], 0), ([1], [], 2), ([1], [0.1, 0.2], 0)]
)
def test_a_frame_that_does_not_add_up_is_a_violation(ids: list[int], logprobs: list[float], places: int) -> None:
    frame = link_pb2.Tokens(id=1, ids=ids, logprobs=logprobs, likely=[link_pb2.Likely()] * places)
    with pytest.raises(ProtocolViolation):
        frames.token_batch_of(frame)


def test_a_batch_arrives_with_its_logprobs() -> None:
    batch = TokenBatch(7, (1, 2), (-0.5, -1.5), ((TopLogprob(1, -0.5), TopLogprob(9, -2.0)), (TopLogprob(2, -1.5),)))
    [frame] = frames.parse(frames.tokens([(3, batch)]))
    assert frame.tokens.id == 3
    assert frames.token_batch_of(frame.tokens) == batch


@on_virtual_time
async def test_tokens_for_a_caller_that_wants_none_are_a_violation() -> None:
    async with running() as pair:
        pair.host.gate.clear()
        waiting = asyncio.create_task(pair.ask())
        await settle(20)
        await pair.answering.write(frames.tokens([(1, TokenBatch(0, (1,)))]))

        with pytest.raises(Disconnected, match="wants them with its answer"):
            await waiting


@on_virtual_time
async def test_credit_for_nothing_is_a_violation_and_late_credit_is_not() -> None:
    async with running() as pair:
        await pair.ask()
        pair.client.session.send(frames.credit(1, 5))
        await settle(20)
        assert pair.client.open
        pair.client.session.send(frames.credit(99, 5))
        assert "credit for request 99" in await pair.ends[1]

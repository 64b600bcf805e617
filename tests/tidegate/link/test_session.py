"""Both ends of the link in memory, on virtual time: they greet, send heartbeats and loads, and say goodbye."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.loop import on_virtual_time, settle
from tests.support.serving.duplex import stream_pair
from tests.support.serving.link_pair import OFFERS, Heard, Pair, client_on, running, tensor_of
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.link import frames
from tidegate.link.frames import Greeting
from tidegate.outcome import Overloaded, Unreachable
from tidegate.rpc import link_pb2

# greeting


@on_virtual_time
async def test_both_sides_greet_and_the_answering_one_says_what_it_offers() -> None:
    async with running() as pair:
        [greeting] = pair.heard.greetings
        assert (greeting.name, greeting.epoch, greeting.offers) == ("edge/attic", 9, OFFERS)
        assert pair.client.open
        assert pair.service.streams == 1


@on_virtual_time
async def test_before_the_greeting_nothing_is_asked() -> None:
    pair = Pair()

    with pytest.raises(Unreachable, match="not said hello"):
        await pair.ask()


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        (frames.ping(0.0), "ping before hello"),
        (link_pb2.Envelope(frames=[link_pb2.Frame()]).SerializeToString(), "an unknown frame before hello"),
        (link_pb2.Envelope(frames=[{"hello": {"protocol": 9}}]).SerializeToString(), "link protocol 9"),
        (link_pb2.Envelope(frames=[{"hello": {"protocol": 1, "offers": b"]"}}]).SerializeToString(), "cannot be read"),
        (b"\xff\xff", "no Envelope"),
        (2 * frames.hello(Greeting("edge/attic", 1, "0")), "a hello frame, which this side does not take"),
        (frames.hello(Greeting("a", 1, "0")) + frames.cancel(1), "a cancel frame, which this side does not take"),
    ],
)
def test_a_side_that_does_not_begin_as_agreed_is_hung_up_on(envelope: bytes, words: str) -> None:
    @on_virtual_time
    async def scenario() -> None:
        ours, theirs = stream_pair()
        client = client_on(ours, Heard())

        await theirs.write(envelope)

        assert words in await client.run()
        assert not client.open

    scenario()


# heartbeats


@pytest.mark.slow
@on_virtual_time
async def test_an_idle_link_stays_up_and_its_round_trip_is_measured() -> None:
    async with running() as pair:
        await clock.sleep(3600.0)

        assert not any(end.done() for end in pair.ends)
        assert len(pair.heard.rtts) == pytest.approx(3600, abs=2)
        assert set(pair.heard.rtts) == {0.0}


@on_virtual_time
async def test_a_link_that_falls_silent_is_dead_within_four_heartbeats_on_both_sides() -> None:
    async with running() as pair:
        pair.host.gate.clear()
        await clock.sleep(10.5)
        asking = asyncio.create_task(pair.ask())
        await pair.host.begun.acquire()
        silent_at = clock.now()
        pair.asking.inbound.silent = pair.asking.outbound.silent = True

        with pytest.raises(Unreachable, match="silent for 3 heartbeats of 1 s"):
            await asking

        assert 2.0 <= clock.now() - silent_at <= 4.0
        await asyncio.gather(*pair.ends)
        assert clock.now() - silent_at <= 4.0
        assert pair.host.cancelled == 1


@on_virtual_time
async def test_a_link_whose_other_side_never_greets_is_dead_as_soon() -> None:
    ours, _theirs = stream_pair()
    started = clock.now()

    reason = await client_on(ours, Heard()).run()

    assert reason == "silent for 3 heartbeats of 1 s"
    assert clock.now() - started == pytest.approx(3.0)


@on_virtual_time
async def test_a_flood_of_pings_queues_one_pong_and_an_impossible_echo_is_no_measurement() -> None:
    async with running() as pair:
        before = len(pair.asking.outbound.written)
        pair.asking.inbound.messages.put_nowait(frames.ping(1.0) * 1000 + frames.ping(2.0) + frames.pong(2**63))
        await settle()

        sent = [frame for raw in pair.asking.outbound.written[before:] for frame in frames.parse(raw)]
        assert [(frame.WhichOneof("kind"), frame.pong.sent_at_us) for frame in sent] == [("pong", 2_000_000)]
        assert min(pair.heard.rtts, default=0.0) >= 0.0


@on_virtual_time
async def test_pings_do_not_pile_up_on_a_link_that_stands_still() -> None:
    async with running() as pair:
        pair.asking.outbound.stuck = True
        await clock.sleep(2.5)

        assert "<Outbox 2 frames" in repr(pair.client), "one ping and one pong, however many were due"


# load and goodbye


@on_virtual_time
async def test_load_is_told_with_every_heartbeat_and_offers_only_when_they_change() -> None:
    async with running() as pair:
        await clock.sleep(2.5)
        assert [offers for _, offers in pair.heard.loads] == [None, None]

        pair.offers = (*OFFERS, ModelOffer("digits", "1", ()))
        pair.service.announce()
        await settle()
        pair.service.announce()
        await settle()

        assert [offers for _, offers in pair.heard.loads[2:]] == [pair.offers, None]
        sequences = [sequence for sequence, _ in pair.heard.loads]
        assert sequences == sorted(sequences)


@on_virtual_time
async def test_a_drain_answers_what_is_under_way_and_takes_nothing_new() -> None:
    async with running() as pair:
        pair.host.gate.clear()
        under_way = asyncio.create_task(pair.ask())
        await pair.host.begun.acquire()

        draining = asyncio.create_task(pair.service.drain("update"))
        await settle()

        assert pair.heard.goodbyes == ["update"]
        with pytest.raises(Unreachable, match="leaving: update"):
            await pair.ask()
        assert not draining.done()
        pair.host.gate.set()
        assert tensor_of(await under_way) == b"abc"
        await draining
        assert (await asyncio.gather(pair.ends[1]))[0] == "left: update"


@on_virtual_time
async def test_a_stream_that_is_dialled_while_draining_is_closed_without_a_hello() -> None:
    pair = Pair()
    await pair.service.drain("update")

    reason = await pair.service.serve(pair.answering)

    assert reason == "leaving: update"
    assert pair.answering.outbound.written == []


@on_virtual_time
async def test_a_request_that_crosses_the_goodbye_is_refused_as_overloaded() -> None:
    async with running() as pair:
        pair.host.gate.clear()
        under_way = asyncio.create_task(pair.ask())
        await pair.host.begun.acquire()
        pair.asking.inbound.silent = True
        draining = asyncio.create_task(pair.service.drain("update"))
        await settle()
        pair.asking.inbound.silent = False  # the goodbye itself was lost on the way

        with pytest.raises(Overloaded, match="leaving: update"):
            await pair.ask()

        pair.host.gate.set()
        await under_way
        await draining

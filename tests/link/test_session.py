"""Both ends of the link over a stream in memory, on virtual time: every heartbeat and every race exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.duplex import MemoryStream, stream_pair
from tests.support.hosts import EchoHost, echo_request
from tests.support.loop import on_virtual_time, settle
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.link import frames
from tidegate.link.asker import Asker, Question
from tidegate.link.frames import Answered, Greeting
from tidegate.link.outbox import Outbox
from tidegate.link.service import LinkService
from tidegate.link.session import Heartbeat
from tidegate.oip.grpc import message_from_request
from tidegate.outcome import (
    BadAnswer,
    DeadlineExceeded,
    Disconnected,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotSupported,
    Overloaded,
    TooLarge,
    Unreachable,
)
from tidegate.rpc import link_pb2, oip_pb2
from tidegate.types import Accepted, LoadReport

OFFERS = (ModelOffer("echo", "3", ()),)
BEAT = Heartbeat(interval_s=1.0, silent_ticks=3)


class Heard:
    """A `Listener` that keeps what it was told."""

    def __init__(self) -> None:
        self.greetings: list[Greeting] = []
        self.loads: list[tuple[int, tuple[ModelOffer, ...] | None]] = []
        self.rtts: list[float] = []
        self.goodbyes: list[str] = []

    def greeted(self, greeting: Greeting) -> None:
        self.greetings.append(greeting)

    def loaded(self, load: LoadReport, offers: tuple[ModelOffer, ...] | None) -> None:
        self.loads.append((load.sequence, offers))

    def measured(self, rtt_s: float) -> None:
        self.rtts.append(rtt_s)

    def leaving(self, reason: str) -> None:
        self.goodbyes.append(reason)


class Pair:
    """An asker and a service on the two ends of one stream in memory."""

    def __init__(self, **service_options: Any) -> None:
        self.asking, self.answering = stream_pair()
        self.host = EchoHost()
        self.heard = Heard()
        self.offers: tuple[ModelOffer, ...] = OFFERS
        self.sequence = 0
        self.asker = asker_on(self.asking, self.heard, outbox=service_options.pop("outbox", None))
        self.service = LinkService(
            self.host,
            name="edge/attic",
            epoch=lambda: 9,
            offers=lambda: self.offers,
            load=self.load,
            heartbeat=BEAT,
            **service_options,
        )
        self.ends: list[asyncio.Task[str]] = []

    def load(self) -> LoadReport:
        self.sequence += 1
        return LoadReport(9, self.sequence, queued=0, in_flight=0, queue_delay_s=0.0)

    async def ask(self, raw: bytes = b"abc", *, budget_s: float = 10.0, **words: Any) -> Answered:
        return await self.asker.ask(question(raw, budget_s=budget_s, **words))


def asker_on(stream: MemoryStream, heard: Heard, *, outbox: Outbox | None = None) -> Asker:
    return Asker(stream, Greeting("gateway/test", 0, "0"), heard, heartbeat=BEAT, outbox=outbox, max_message_bytes=5000)


def question(
    raw: bytes = b"abc",
    *,
    budget_s: float = 10.0,
    model: str = "echo",
    variant: str = "",
    on_accepted: Callable[[Accepted], None] = lambda _word: None,
) -> Question:
    message = message_from_request(echo_request(raw, model=model)).SerializeToString()
    return Question(message, clock.now() + budget_s, 2, variant, "00-ab-cd-01", on_accepted)


def tensor_of(answered: Answered) -> bytes:
    return oip_pb2.ModelInferResponse.FromString(answered.message).raw_output_contents[0]


@asynccontextmanager
async def running(**service_options: Any) -> AsyncIterator[Pair]:
    pair = Pair(**service_options)
    pair.ends = [asyncio.create_task(pair.asker.run()), asyncio.create_task(pair.service.serve(pair.answering))]
    await settle(20)  # greeted, and the first pings answered
    yield pair
    for end in pair.ends:
        end.cancel()
    await asyncio.gather(*pair.ends, return_exceptions=True)


# greeting


@on_virtual_time
async def test_both_sides_greet_and_the_answering_one_says_what_it_offers() -> None:
    async with running() as pair:
        [greeting] = pair.heard.greetings
        assert (greeting.name, greeting.epoch, greeting.offers) == ("edge/attic", 9, OFFERS)
        assert pair.asker.open
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
        asker = asker_on(ours, Heard())

        await theirs.write(envelope)

        assert words in await asker.run()
        assert not asker.open

    scenario()


# questions and answers


@on_virtual_time
async def test_a_question_is_accepted_and_answered_with_its_times_and_load() -> None:
    async with running() as pair:
        words: list[Accepted] = []

        answered = await pair.ask(b"hello", on_accepted=words.append)

        assert tensor_of(answered) == b"hello"
        assert (answered.queue_s, answered.compute_s, answered.batch_size, answered.variant) == (
            0.002,
            0.005,
            4,
            "fp32",
        )
        assert words == [Accepted(0, 0.25)]
        assert answered.load is not None
        assert answered.load.epoch == 9


@on_virtual_time
async def test_a_call_carries_everything_the_asker_said() -> None:
    async with running() as pair:
        await pair.ask(budget_s=3.0, variant="fp32")

        [call] = pair.host.calls
        assert (call.protocol, call.priority, call.variant, call.headers) == (
            "link", 2, "fp32", {"traceparent": "00-ab-cd-01"},
        )  # fmt: skip
        assert pair.host.budgets_s == [pytest.approx(3.0)]


@on_virtual_time
async def test_questions_that_are_ready_together_travel_in_one_envelope_and_so_do_their_answers() -> None:
    async with running() as pair:
        asked_before, answered_before = len(pair.asking.outbound.written), len(pair.answering.outbound.written)

        await asyncio.gather(*[pair.ask() for _ in range(50)])

        assert len(pair.asking.outbound.written) == asked_before + 1
        assert len(pair.answering.outbound.written) == answered_before + 1


@on_virtual_time
async def test_large_bodies_cross_in_both_directions_while_small_questions_overtake_them() -> None:
    async with running(outbox=Outbox(chunk_bytes=64)) as pair:
        finished: list[int] = []

        async def ask(size: int) -> None:
            answered = await pair.ask(bytes(range(256)) * (size // 256) or b"s")
            assert len(tensor_of(answered)) == max(1, size)
            finished.append(size)

        await asyncio.gather(ask(4096), ask(4096), ask(0))

        assert finished == [0, 4096, 4096]


@on_virtual_time
async def test_a_large_answer_comes_in_chunks_and_a_small_one_passes_it() -> None:
    async with running(max_message_bytes=10**6) as pair:
        pair.asker._max_message_bytes = 10**6
        pair.asker._partials._max_message_bytes = pair.asker._partials._max_partial_bytes = 10**6
        pair.host.answer_bytes = 500_000
        slow = asyncio.create_task(pair.ask())
        await pair.host.begun.acquire()
        pair.host.answer_bytes = 1
        await pair.ask()
        assert not slow.done()

        assert len(tensor_of(await slow)) == 500_000


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("x is wrong"), InvalidRequest),
        (Overloaded("full", retry_after_s=0.5), Overloaded),
        (DeadlineExceeded("late"), DeadlineExceeded),
        (ZeroDivisionError("secret"), InternalError),
        (asyncio.CancelledError(), InternalError),
    ],
)
def test_whatever_the_host_raises_is_raised_here_under_its_own_class(
    error: BaseException, expected: type[Exception]
) -> None:
    @on_virtual_time
    async def scenario() -> None:
        async with running() as pair:
            pair.host.error = error

            with pytest.raises(expected) as refusal:
                await pair.ask()

            assert "secret" not in str(refusal.value)
            assert getattr(error, "retry_after_s", None) == getattr(refusal.value, "retry_after_s", None)
            pair.host.error = None
            await pair.ask()  # and the stream goes on

    scenario()


@on_virtual_time
async def test_a_request_is_checked_against_the_manifest_like_any_other() -> None:
    async with running() as pair:
        with pytest.raises(ModelNotFound):
            await pair.ask(model="nothing")
        with pytest.raises(InvalidRequest):
            await pair.ask(variant="fp64")
        with pytest.raises(InvalidRequest, match="no ModelInferRequest"):
            await pair.asker.ask(Question(b"\xff\xff", clock.now() + 1, 0, "", "", lambda _word: None))

        assert pair.host.calls == []


# endings before an answer


@on_virtual_time
async def test_a_cancelled_question_is_cancelled_where_it_is_worked_on() -> None:
    async with running() as pair:
        pair.host.gate.clear()
        asking = asyncio.create_task(pair.ask())
        await pair.host.begun.acquire()

        asking.cancel()

        with pytest.raises(asyncio.CancelledError):
            await asking
        await pair.host.left.acquire()
        await settle()
        assert (pair.host.cancelled, pair.asker.pending, pair.service.under_way) == (1, 0, 0)


@on_virtual_time
async def test_a_question_that_is_given_up_before_it_left_is_never_heard_of() -> None:
    async with running() as pair:
        pair.asking.outbound.stuck = True
        pair.asker.session.send(frames.goodbye("takes the writer"))
        await settle()
        asking = asyncio.create_task(pair.ask())
        await settle()
        asking.cancel()

        with pytest.raises(asyncio.CancelledError):
            await asking

        pair.asking.outbound.stuck = False
        await clock.sleep(0.1)
        assert pair.host.calls == []
        sent = [frame.WhichOneof("kind") for raw in pair.asking.outbound.written for frame in frames.parse(raw)]
        assert "request" not in sent
        assert "cancel" not in sent


@on_virtual_time
async def test_a_question_ends_with_its_budget_and_so_does_the_work_on_it() -> None:
    async with running() as pair:
        pair.host.gate.clear()
        asked_at = clock.now()

        with pytest.raises(DeadlineExceeded):
            await pair.ask(budget_s=0.5)

        assert clock.now() - asked_at == pytest.approx(0.5)
        await pair.host.left.acquire()
        assert pair.host.cancelled == 1


@on_virtual_time
async def test_each_question_ends_with_its_own_budget_in_whatever_order_they_were_asked() -> None:
    async with running() as pair:
        pair.host.gate.clear()
        asked_at = clock.now()
        ended: list[tuple[float, float]] = []

        async def ask(budget_s: float) -> None:
            with pytest.raises(DeadlineExceeded):
                await pair.ask(budget_s=budget_s)
            ended.append((budget_s, clock.now() - asked_at))

        await asyncio.gather(*[ask(budget_s) for budget_s in (3.0, 1.0, 2.0, 1.0, 0.5)])

        assert [budget_s for budget_s, _ in ended] == [0.5, 1.0, 1.0, 2.0, 3.0]
        assert all(took_s == pytest.approx(budget_s) for budget_s, took_s in ended)


@on_virtual_time
async def test_without_time_left_nothing_is_sent() -> None:
    async with running() as pair:
        with pytest.raises(DeadlineExceeded, match="no time was left"):
            await pair.ask(budget_s=0.0)

        assert pair.host.calls == []


@on_virtual_time
async def test_an_answer_that_comes_too_late_is_ignored() -> None:
    async with running() as pair:
        pair.asking.inbound.silent = True  # the answer and the word of the cancellation cross
        with pytest.raises(DeadlineExceeded):
            await pair.ask(budget_s=0.5)
        late = [raw for raw in pair.asking.inbound.written if b"abc" in raw]
        pair.asking.inbound.silent = False
        assert late

        loads = len(pair.heard.loads)
        pair.asking.inbound.messages.put_nowait(late[0])
        pair.asking.inbound.messages.put_nowait(late[0])

        assert tensor_of(await pair.ask()) == b"abc"
        assert len(pair.heard.loads) == loads + 2, "but for its news of the load"


@on_virtual_time
async def test_when_the_stream_ends_everything_pending_fails_at_once_and_the_work_stops() -> None:
    async with running() as pair:
        pair.host.gate.clear()
        asking = [asyncio.create_task(pair.ask()) for _ in range(3)]
        for _ in asking:
            await pair.host.begun.acquire()

        pair.asking.inbound.lose("UNAVAILABLE: Socket closed")
        pair.answering.inbound.lose("gone")

        for task in asking:
            with pytest.raises(Unreachable, match="Socket closed"):
                await task
        assert await asyncio.gather(*pair.ends) == ["UNAVAILABLE: Socket closed", "gone"]
        assert (pair.host.cancelled, pair.service.streams) == (3, 0)
        with pytest.raises(Unreachable, match="Socket closed"):
            await pair.ask()


# size


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
async def test_whoever_waits_for_room_gets_it_as_the_link_drains() -> None:
    async with running(outbox=Outbox(room_bytes=1)) as pair:
        answers = await asyncio.gather(*[pair.ask(b"%d" % number) for number in range(20)])

        assert [tensor_of(answered) for answered in answers] == [b"%d" % number for number in range(20)]


@on_virtual_time
async def test_whoever_waits_for_room_hears_that_the_stream_has_ended() -> None:
    async with running(outbox=Outbox(room_bytes=1)) as pair:
        pair.asking.outbound.stuck = True
        asking = [asyncio.create_task(pair.ask()) for _ in range(4)]
        await settle()

        pair.asking.inbound.lose("gone")

        for task in asking:
            with pytest.raises(Unreachable, match="gone"):
                await task


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


# heartbeats


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

    reason = await asker_on(ours, Heard()).run()

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

        assert "<Outbox 2 frames" in repr(pair.asker), "one ping and one pong, however many were due"


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


# evidence


@on_virtual_time
async def test_evidence_is_made_for_the_nonce_and_the_asker_and_a_refusal_comes_with_its_words() -> None:
    def prove(nonce: bytes, asker: bytes | None) -> bytes:
        if nonce == b"no":
            raise ValueError("not for you")
        return nonce + b" of " + (asker or b"nobody")

    async with running(attest=prove) as pair:
        assert await pair.asker.evidence(b"n1") == b"n1 of nobody"
        with pytest.raises(NotSupported, match="not for you"):
            await pair.asker.evidence(b"no")
        assert await pair.asker.evidence(b"n2") == b"n2 of nobody"
        assert tensor_of(await pair.ask()) == b"abc"


@on_virtual_time
async def test_of_a_flood_of_challenges_the_newest_is_answered() -> None:
    made: list[bytes] = []

    def prove(nonce: bytes, _asker: bytes | None) -> bytes:
        made.append(nonce)
        return nonce

    async with running(attest=prove) as pair:
        for number in range(100):
            pair.asker.session.send(frames.challenge(b"%d" % number))
        assert await pair.asker.evidence(b"last") == b"last"
        assert len(made) < 10 and made[-1] == b"last"


@on_virtual_time
async def test_whoever_waits_for_evidence_hears_that_the_stream_has_ended() -> None:
    ours, theirs = stream_pair()
    asker = asker_on(ours, Heard())
    run = asyncio.create_task(asker.run())
    await theirs.write(frames.hello(Greeting("edge/attic", 1, "0")))
    await settle(5)
    asking = asyncio.create_task(asker.evidence(b"n"))
    await settle(5)
    await theirs.write(frames.chunk(99, b"x"))  # nothing that it asked for: it hangs up
    assert "request 99" in await run
    with pytest.raises(Disconnected, match="request 99"):
        await asking
    with pytest.raises(Unreachable, match="request 99"):
        await asker.evidence(b"n")


# hostile frames, each against the side that would read it

HELLO = frames.hello(Greeting("gateway/test", 0, "0"))
REQUEST = frames.request(1, b"", budget_s=9.0, priority=0, variant="", traceparent="", chunked_bytes=500)


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        (frames.chunk(1, b"x"), "a chunk of request 1, which was not announced"),
        (REQUEST + frames.chunk(1, bytes(501)), "do not fit the 500 bytes announced"),
        (REQUEST + REQUEST, "request 1 announced twice"),
        (REQUEST.replace(b"\x08\x01", b"\x08\x00", 1), "request 0 announced twice"),
        (frames.answer(1, Answered(b"", 0.0, 0.0, 1, "", None)), "an answer frame, which this side does not take"),
    ],
)
def test_an_answering_side_hangs_up_on_frames_that_no_asker_sends(envelope: bytes, words: str) -> None:
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
        (frames.answer(0, Answered(b"", 0.0, 0.0, 1, "", None)), "request 0, which was never sent"),
        (frames.refused(99, BadAnswer("x"), None), "request 99, which was never sent"),
        (frames.chunk(1, b"x"), "a chunk of answer 1, which was not announced"),
        (frames.evidence(b"x"), "evidence that nobody asked for"),
        (frames.load(LoadReport(1, 1, 0, 0, 0.0), b"[oops"), "offers that cannot be read"),
        (2 * frames.answer(1, Answered(b"", 0, 0, 1, "", None), chunked_bytes=9), "message 1 announced twice"),
        (
            frames.answer(1, Answered(b"", 0, 0, 1, "", None), chunked_bytes=9) + frames.chunk(1, bytes(10)),
            "do not fit the 9 bytes announced",
        ),
    ],
)
def test_an_asking_side_hangs_up_on_frames_that_no_answerer_sends(envelope: bytes, words: str) -> None:
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
            assert pair.asker.pending == 0

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
    async with running() as pair:
        pair.host.answer_bytes = 50_000_000
        pair.asker._partials._max_message_bytes = pair.asker._partials._max_partial_bytes = 10**8
        asking = asyncio.create_task(pair.ask())
        await pair.host.left.acquire()
        await settle(20)

        asking.cancel()

        with pytest.raises(asyncio.CancelledError):
            await asking
        pair.host.answer_bytes = 1
        await pair.ask()
        assert sum(map(len, pair.answering.outbound.written)) < 10_000_000

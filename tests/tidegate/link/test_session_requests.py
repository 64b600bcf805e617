"""Questions over one stream and every way in which they end, on virtual time: each race exact."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tests.support.loop import on_virtual_time, settle
from tests.support.serving.link_pair import BEAT, running, tensor_of
from tidegate import clock
from tidegate.link import frames
from tidegate.link.client import Question
from tidegate.link.outbox import Outbox, Parcel
from tidegate.outcome import DeadlineExceeded, InternalError, InvalidRequest, ModelNotFound, Overloaded, Unreachable
from tidegate.types import Accepted

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
async def test_a_call_carries_everything_the_client_sent() -> None:
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
    async with running(client_max_bytes=10**6, max_message_bytes=10**6) as pair:
        pair.host.answer_bytes = 500_000
        slow = asyncio.create_task(pair.ask())
        await pair.host.begun.acquire()
        pair.host.answer_bytes = 1
        await pair.ask()
        assert not slow.done()

        assert len(tensor_of(await slow)) == 500_000


@on_virtual_time
async def test_a_large_answer_that_is_written_is_held_for_no_longer_than_a_heartbeat() -> None:
    def held() -> int:
        gc.collect()
        return sum(isinstance(one, Parcel) and len(one.body) >= 500_000 for one in gc.get_objects())

    async with running(client_max_bytes=10**6, max_message_bytes=10**6) as pair:
        pair.host.answer_bytes = 500_000
        asked = asyncio.create_task(pair.ask())
        await pair.host.begun.acquire()
        await asked
        assert held() == 1, "the other side may cancel it until it knows that it was written"
        await clock.sleep(2 * BEAT.interval_s)
        assert held() == 0


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
            await pair.client.ask(Question(b"\xff\xff", clock.now() + 1, 0, "", "", lambda _word: None))

        assert pair.host.calls == []


@pytest.mark.parametrize("size", [3, 500])
def test_text_that_no_frame_can_hold_ends_its_own_question_and_no_other(size: int) -> None:
    @on_virtual_time
    async def scenario() -> None:
        async with running(outbox=Outbox(chunk_bytes=64)) as pair:
            pair.host.gate.clear()
            other = asyncio.create_task(pair.ask())
            await pair.host.begun.acquire()

            with pytest.raises(InvalidRequest, match="cannot be passed on"):
                await pair.ask(bytes(size), variant="\udcff")

            pair.host.gate.set()
            assert tensor_of(await other) == b"abc"
            assert pair.client.pending == 0
            assert pair.client.open

    scenario()


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
        assert (pair.host.cancelled, pair.client.pending, pair.service.under_way) == (1, 0, 0)


@on_virtual_time
async def test_a_question_that_is_given_up_before_it_left_is_never_heard_of() -> None:
    async with running() as pair:
        pair.asking.outbound.stuck = True
        pair.client.session.send(frames.goodbye("takes the writer"))
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

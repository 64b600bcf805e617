"""Whose trace a request belongs to, and what is said of it onward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request.machine import MAX_ATTEMPTS
from gateway.layers.traced import traced
from gateway.observe.spans import spans_of
from tests.support.gateway.flowns import answered, request_record, went
from tests.support.gateway.flowns import given as answer
from tidegate.trace_context import MOST_STATE, Trace, current, join_trace, start_trace
from tidegate.tracing.propagation import attempt_span_id, outgoing_context
from tidegate.types import Call, InferRequest, InferResponse, Reply

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-2] + "00"


def bits(count: int) -> int:
    return 7 if count == 128 else 9


def test_a_callers_trace_is_joined_with_a_span_of_our_own() -> None:
    trace = join_trace(PARENT, "vendor=1", bits)
    assert trace is not None
    assert (trace.hex_id, trace.parent_id, trace.span_id) == (TRACE_ID, 0xB7AD6B7169203331, 9)
    assert trace.sampled and trace.kept
    assert trace.state == "vendor=1"
    assert trace.traceparent() == f"00-{TRACE_ID}-0000000000000009-01"


@pytest.mark.parametrize(
    "said",
    [
        "",
        "ff" + PARENT[2:],
        PARENT + "-more",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        PARENT.upper(),
        "x" * 10_000,
    ],
)
def test_what_is_no_traceparent_begins_no_trace(said: str) -> None:
    assert join_trace(said, "", bits) is None


def test_a_later_version_may_say_more() -> None:
    assert join_trace("01" + PARENT[2:] + "-what-comes", "", bits) is not None


def test_a_callers_flag_is_respected() -> None:
    trace = join_trace(UNSAMPLED, "", bits)
    assert trace is not None and not trace.kept
    assert trace.traceparent().endswith("-00")


def test_more_state_than_must_be_carried_is_not() -> None:
    trace = join_trace(PARENT, "a=" + "x" * MOST_STATE, bits)
    assert trace is not None and trace.state == ""


@given(st.integers(0, 2**128 - 1))
def test_the_share_that_is_sampled_goes_by_the_trace_id_alone(trace_id: int) -> None:
    trace = start_trace(lambda count: trace_id if count == 128 else 1, 0.25)
    assert trace.sampled == ((trace_id or 1) % 2**64 < 2**62)
    assert not start_trace(lambda count: trace_id if count == 128 else 1, 0.0).sampled
    assert start_trace(lambda count: trace_id if count == 128 else 1, 1.0).sampled


@given(st.integers(1, 2**64 - 1))
def test_parts_of_a_request_have_ids_of_their_own(span_id: int) -> None:
    trace = Trace(1, span_id, sampled=True)
    ids = [trace.child_id(number) for number in range(1, 100)]
    assert len({span_id, *ids}) >= 99 and 0 not in ids


def call(**headers: str) -> Call:
    return Call(InferRequest("minilm", ()), "oip-http", 0.0, headers=headers)


async def served(asked: Call, *, keep: bool = False, ratio: float = 0.0) -> tuple[Call, Reply]:
    seen: list[Call] = []

    async def inner(call: Call) -> Reply:
        assert call.trace is current.get()
        assert call.trace is not None
        call.trace.kept |= keep
        seen.append(call)
        return Reply(InferResponse("minilm", "1", ()))

    reply = await traced(bits, ratio)(inner)(asked)
    assert current.get() is None
    return seen[0], reply


async def test_a_caller_is_told_the_trace_that_he_brought_or_that_is_kept() -> None:
    _, reply = await served(call(traceparent=UNSAMPLED))
    assert reply.traceparent == f"00-{TRACE_ID}-0000000000000009-00"
    _, reply = await served(call(), keep=True)
    assert reply.traceparent == f"00-{7:032x}-{9:016x}-01"
    _, reply = await served(call())
    assert reply.traceparent == "", "nobody would find it"


async def test_a_traceparent_may_come_as_a_parameter() -> None:
    request = InferRequest("minilm", (), parameters={"traceparent": PARENT, "tracestate": "a=1"})
    seen, _ = await served(Call(request, "oip-grpc", 0.0))
    assert seen.trace is not None
    assert (seen.trace.hex_id, seen.trace.state) == (TRACE_ID, "a=1")


@pytest.mark.parametrize("said", [3, True, 1.5, "", "nonsense"])
async def test_a_parameter_that_is_no_traceparent_is_none(said: str | float) -> None:
    seen, _ = await served(Call(InferRequest("minilm", (), parameters={"traceparent": said}), "oip-grpc", 0.0))
    assert seen.trace is not None and seen.trace.trace_id == 7


def test_an_attempt_is_sent_under_its_own_span() -> None:
    trace = join_trace(PARENT, "a=1", bits)
    assert trace is not None
    parent, state = outgoing_context(call().traced(trace), 1)
    assert parent == f"00-{TRACE_ID}-{attempt_span_id(trace, 1):016x}-01"
    assert state == "a=1"


def test_without_tracing_a_callers_words_are_passed_on_and_without_a_sample_there_are_none() -> None:
    assert outgoing_context(call(traceparent=PARENT, tracestate="a=1"), 0) == (PARENT, "a=1")
    assert outgoing_context(call().traced(start_trace(bits, 0.0)), 0) == ("", "")


def kept() -> Trace:
    trace = join_trace(PARENT, "", bits)
    assert trace is not None
    return trace


def test_a_request_is_told_as_its_waterfall() -> None:
    trace = kept()
    record = request_record(notes=answered(0, "edge/a", 0.002))
    spans = spans_of(trace, record)
    by_name = {span.name: span for span in spans}
    root, attempt = by_name["infer minilm"], by_name["attempt edge/a"]
    assert (root.span_id, root.parent_id, root.kind) == (9, 0xB7AD6B7169203331, "server")
    assert (root.began_at, root.ended_at) == (record.arrived_at, pytest.approx(record.ended_at))
    assert (attempt.parent_id, attempt.span_id) == (9, attempt_span_id(trace, 0))
    for stage in ("link out", "queue", "compute", "link back"):
        assert by_name[stage].parent_id == attempt.span_id
    for stage in ("admit", "classify", "place"):
        assert by_name[stage].parent_id == root.span_id
    assert root.attributes["tidegate.served_by"] == "edge/a"
    assert [event.name for event in attempt.events] == ["accepted"]
    inside = sum(span.ended_at - span.began_at for span in spans if span.name not in (root.name, attempt.name))
    assert inside == pytest.approx(record.elapsed_s, rel=0.02), "its stages add up to its latency"
    assert len({span.span_id for span in spans}) == len(spans)


def test_every_attempt_is_there_and_a_failed_one_says_why() -> None:
    notes = [
        *went(0, "edge/a", 0.0, ends=0.02, what="failed", words="unreachable: the link broke"),
        *answered(1, "pool/main", 0.02),
    ]
    spans = spans_of(
        kept(), request_record(notes=notes, reasons=("cheapest", "fallback"), end=answer("pool/main", attempt=1))
    )
    attempts = [span for span in spans if span.name.startswith("attempt")]
    assert [span.error for span in attempts] == ["unreachable: the link broke", ""]
    assert attempts[1].attributes["tidegate.reason"] == "fallback"
    assert MAX_ATTEMPTS * 2 < 60, "their ids are counted up below those of stages"


def test_a_request_without_an_answer_is_an_error() -> None:
    spans = spans_of(kept(), request_record(notes=[], reasons=(), end="nothing_alive: nobody is there"))
    assert spans[0].error == "nothing_alive: nobody is there"
    assert spans[0].attributes["tidegate.outcome"] == "nothing_alive"


def test_a_trace_shows_itself() -> None:
    assert repr(kept()) == f"<Trace {TRACE_ID} kept>"

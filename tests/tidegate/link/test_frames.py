"""Frames as bytes and back, for every value that either side can hold."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.fleet.offers import ModelOffer, VariantOffer, encode_offers
from tidegate.link import frames
from tidegate.link.frames import AnswerFrame, Greeting, ProtocolViolation
from tidegate.outcome import ERRORS, BadAnswer, ServeError
from tidegate.rpc import link_pb2
from tidegate.types import Accepted, LoadReport

OFFERS = (ModelOffer("minilm", "1", (VariantOffer("int8", "int8", cost=((8.0, 0.002),), max_tokens=128),)),)
REPORT = LoadReport(epoch=5, sequence=17, queued=3, in_flight=1, queue_delay_s=0.25)


def only(envelope: bytes) -> Any:
    """The message inside the one frame of an Envelope."""
    [frame] = frames.parse(envelope)
    kind = frame.WhichOneof("kind")
    assert kind is not None
    return getattr(frame, kind)


def test_envelopes_join_by_their_bytes() -> None:
    joined = frames.cancel(1) + frames.goodbye("update") + frames.chunk(2, b"xyz")

    kinds = [frame.WhichOneof("kind") for frame in frames.parse(joined)]

    assert kinds == ["cancel", "goodbye", "chunk"]


def test_what_is_no_envelope_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolViolation, match="5 bytes that are no Envelope"):
        frames.parse(b"\xff\xff\xff\xff\xff")


def test_a_greeting_comes_back_as_it_was_said() -> None:
    for greeting in (Greeting("edge/attic", 1_700_000_000, "0.1.0", OFFERS), Greeting("gateway/main", 0, "0.1.0")):
        assert frames.greeting_of(only(frames.hello(greeting))) == greeting


def test_another_protocol_is_refused_by_its_number() -> None:
    with pytest.raises(ProtocolViolation, match="protocol 2; this side speaks 1"):
        frames.greeting_of(link_pb2.Hello(protocol=2, name="edge/attic"))


@pytest.mark.parametrize(
    "raw", [b"not json", b"{}", b'[{"name": 3}]', b"[" * 100_000, b'["\xff"]', b" " * (frames.MAX_OFFERS_BYTES + 1)]
)
def test_offers_that_cannot_be_read_break_the_protocol(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        frames.offers_of(raw)


def test_a_request_says_what_is_left_of_its_budget_and_how_to_serve_it() -> None:
    frame = only(frames.request(7, b"body", budget_s=1.5, priority=2, variant="fp32", traceparent="00-ab-cd-01"))

    assert (frame.id, frame.budget_us, frame.priority, frame.variant, frame.traceparent, frame.message) == (
        7, 1_500_000, 2, "fp32", "00-ab-cd-01", b"body",
    )  # fmt: skip


@pytest.mark.parametrize(("budget_s", "budget_us"), [(0.0, 1), (-3.0, 1), (nan, 1), (1e-9, 1), (inf, 2**53)])
def test_a_budget_that_is_gone_is_never_written_as_none(budget_s: float, budget_us: int) -> None:
    frame = only(frames.request(7, b"", budget_s=budget_s, priority=0, variant="", traceparent=""))

    assert frame.budget_us == budget_us


def test_a_request_in_chunks_announces_their_bytes_and_carries_none() -> None:
    frame = only(frames.request(7, b"body", budget_s=1.0, priority=0, variant="", traceparent="", chunked_bytes=4))

    assert (frame.message, frame.chunked_bytes) == (b"", 4)


@pytest.mark.parametrize("report", [None, REPORT])
@pytest.mark.parametrize("chunked_bytes", [0, 6])
def test_an_answer_comes_back_as_it_was_given(report: LoadReport | None, chunked_bytes: int) -> None:
    answered = AnswerFrame(b"tensor", 0.125, 0.5, 8, "int8", report)

    frame = only(frames.answer(7, answered, chunked_bytes=chunked_bytes))

    assert (frame.id, frame.chunked_bytes) == (7, chunked_bytes)
    assert frame.message == (b"" if chunked_bytes else b"tensor")
    assert frames.answered_of(frame, b"tensor") == answered


@pytest.mark.parametrize("error_class", ERRORS)
@pytest.mark.parametrize("retry_after_s", [None, 0.25])
def test_a_refusal_is_rebuilt_as_the_very_error(error_class: type[ServeError], retry_after_s: float | None) -> None:
    frame = only(frames.refused(7, error_class("why", retry_after_s=retry_after_s), REPORT))

    error = frames.error_of(frame)

    assert (type(error), error.message, error.retry_after_s) == (error_class, "why", retry_after_s)
    assert frames.load_of(frame.load) == REPORT


def test_a_refusal_of_a_kind_that_only_a_newer_peer_knows_is_a_bad_answer() -> None:
    frame = link_pb2.Refused(id=7, code="out_of_cheese", message="none left")

    assert type(frames.error_of(frame)) is BadAnswer
    assert not only(frames.refused(7, BadAnswer("x"), None)).HasField("load")


def test_load_travels_with_offers_only_when_they_changed() -> None:
    bare, full = only(frames.load(REPORT)), only(frames.load(REPORT, encode_offers(OFFERS)))

    assert frames.load_of(bare) == frames.load_of(full) == REPORT
    assert bare.offers == b""
    assert frames.offers_of(full.offers) == OFFERS


def test_pings_carry_the_instant_and_pongs_echo_it() -> None:
    assert only(frames.ping(2.5)).sent_at_us == 2_500_000
    assert only(frames.pong(2**64 - 1)).sent_at_us == 2**64 - 1


@given(
    queue_ahead=st.integers(),
    seconds=st.floats(),
)
def test_numbers_that_do_not_fit_are_written_as_the_nearest_that_do(queue_ahead: int, seconds: float) -> None:
    word = frames.accepted_of(only(frames.accepted(1, Accepted(queue_ahead, seconds))))

    assert 0 <= word.queue_ahead <= 2**32 - 1
    assert 0.0 <= word.finish_in_s <= 2**53 / 1e6
    if 0 <= queue_ahead < 2**32:
        assert word.queue_ahead == queue_ahead
    if 0.0 <= seconds < 1e6:
        assert word.finish_in_s == pytest.approx(seconds, abs=1e-6)

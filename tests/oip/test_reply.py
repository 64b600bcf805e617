"""What an answer says of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.oip.reply import load_from_text, load_text, reply_headers, reply_parameters
from tidegate.types import InferResponse, LoadReport, Reply, Route

RESPONSE = InferResponse("minilm", "1", ())


def test_an_answer_says_where_why_and_how_much_time_is_left() -> None:
    reply = Reply(
        RESPONSE,
        stages={"queue": 0.001, "compute": 0.0084},
        route=Route("pool/east", "fallback", "fp32", attempts=2, fallback=True, degraded=True),
        budget_left_s=1.23456,
    )
    assert reply_headers(reply) == {
        "tidegate-served-by": "pool/east",
        "tidegate-route": "fallback; variant=fp32; attempts=2; hedged=0; fallback=1; degraded=1",
        "tidegate-budget-left-ms": "1234.6",
        "server-timing": "queue;dur=1.000, compute;dur=8.400",
    }


def test_a_late_answer_says_by_how_much() -> None:
    assert reply_headers(Reply(RESPONSE, budget_left_s=-0.05)) == {"tidegate-budget-left-ms": "-50.0"}


def test_nothing_is_said_that_is_not_known() -> None:
    assert reply_headers(Reply(RESPONSE)) == {}


def test_a_load_is_for_machines_and_stays_out_of_the_parameters() -> None:
    reply = Reply(RESPONSE, load=LoadReport(3, 17, 2, 1, 0.025))
    assert reply_parameters(reply) == {}
    assert load_from_text(reply_headers(reply)["endpoint-load-metrics"]) == reply.load


counts = st.integers(min_value=0, max_value=2**53)


@given(counts, counts, counts, counts, st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_a_load_crosses_its_text_unchanged(a: int, b: int, c: int, d: int, delay_s: float) -> None:
    load = LoadReport(a, b, c, d, delay_s)
    assert load_from_text(load_text(load)) == load


@given(st.text())
def test_any_text_is_a_load_or_none(text: str) -> None:
    assert load_from_text(text) is None


@pytest.mark.parametrize("broken", ["epoch=-1", "queued=x", "queue_delay_s=nan", "queue_delay_s=-1"])
def test_a_damaged_load_is_none(broken: str) -> None:
    name = broken.partition("=")[0]
    good = load_text(LoadReport(1, 2, 3, 4, 0.5)).split(", ")
    parts = [f"{part.partition(name)[0]}{broken}" if f"_{name}=" in part else part for part in good]
    assert parts != good
    assert load_from_text(", ".join(parts)) is None

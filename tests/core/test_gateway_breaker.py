"""The breaker: who is stopped, for how long, and how it is trusted again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.breaker import Breaker, State, Verdict, verdict
from tests.support.fleets import NOW
from tidegate.outcome import ERRORS, BadAnswer, InternalError, ServeError, Unreachable

OK, BAD, NIL = Verdict.SUCCESS, Verdict.FAILURE, Verdict.IGNORED


def opened(draw: float = 0.5) -> Breaker:
    breaker = Breaker(threshold=3, base_s=1.0, cap_s=8.0)
    for _ in range(3):
        breaker.record(BAD, NOW, draw)
    return breaker


def probe(breaker: Breaker, outcome: Verdict, now: float, draw: float = 0.5) -> None:
    assert breaker.allows(now)
    assert breaker.launched()
    breaker.record(outcome, now, draw, probe=True)


@pytest.mark.parametrize("error", [error("x") for error in ERRORS])
def test_only_the_targets_own_faults_count(error: ServeError) -> None:
    at_fault = isinstance(error, Unreachable | BadAnswer | InternalError)
    assert verdict(error) is (BAD if at_fault else NIL)


def test_an_answer_is_a_success() -> None:
    assert verdict(None) is OK


def test_failures_in_a_row_open_it_and_a_success_in_between_starts_again() -> None:
    breaker = Breaker(threshold=3)
    for outcome in (BAD, BAD, OK, BAD, NIL, BAD):
        assert not breaker.launched()
        breaker.record(outcome, NOW, 0.5)
    assert breaker.state is State.CLOSED
    assert repr(breaker) == "<Breaker CLOSED 2/3 failures>"

    breaker.record(BAD, NOW, 0.5)
    assert breaker.state is State.OPEN
    assert not breaker.allows(NOW)


def test_an_open_breaker_lets_one_probe_at_a_time_through_once_it_has_cooled() -> None:
    breaker = opened()
    assert not breaker.allows(NOW + 0.99)
    assert "retry_at=1001.000" in repr(breaker)
    assert breaker.allows(NOW + 1.0)

    assert breaker.launched()
    assert breaker.state is State.HALF_OPEN
    assert not breaker.allows(NOW + 1.0)


def test_two_good_probes_close_it_and_the_next_opening_is_short_again() -> None:
    breaker = opened()
    probe(breaker, OK, NOW + 1.0)
    assert breaker.state is State.HALF_OPEN
    probe(breaker, OK, NOW + 1.1)
    assert breaker.state is State.CLOSED

    for _ in range(3):
        breaker.record(BAD, NOW + 2.0, 0.5)
    assert breaker.retry_at == NOW + 3.0


def test_each_failed_probe_doubles_the_open_time_up_to_the_cap() -> None:
    breaker, now, opens_s = opened(), NOW, []
    for _ in range(6):
        opens_s.append(breaker.retry_at - now)
        now = breaker.retry_at
        probe(breaker, BAD, now)
    assert opens_s == pytest.approx([1.0, 2.0, 4.0, 8.0, 8.0, 8.0])


def test_the_open_time_is_spread_by_a_fifth() -> None:
    assert opened(draw=0.0).retry_at == pytest.approx(NOW + 0.8)
    assert opened(draw=1.0).retry_at == pytest.approx(NOW + 1.2)


def test_a_probe_that_says_nothing_gives_its_place_back() -> None:
    breaker = opened()
    probe(breaker, NIL, NOW + 1.0)
    assert breaker.state is State.HALF_OPEN
    assert breaker.allows(NOW + 1.0)


def test_attempts_from_before_it_opened_change_nothing() -> None:
    breaker = opened()
    breaker.record(OK, NOW + 0.1, 0.5)
    assert breaker.state is State.OPEN
    assert breaker.launched()
    breaker.record(BAD, NOW + 1.1, 0.5)
    assert breaker.state is State.HALF_OPEN
    assert not breaker.allows(NOW + 1.1)


@given(st.lists(st.tuples(st.sampled_from([OK, BAD, NIL]), st.floats(0.0, 3.0), st.floats(0.0, 1.0)), max_size=80))
def test_no_order_of_events_breaks_the_table_or_lets_two_probes_through(
    steps: list[tuple[Verdict, float, float]],
) -> None:
    breaker, now, probing = Breaker(threshold=2), NOW, 0
    for outcome, pause_s, draw in steps:
        now += pause_s
        if breaker.allows(now):
            is_probe = breaker.launched()
            probing += is_probe
            assert probing <= 1
            breaker.record(outcome, now, draw, probe=is_probe)
            probing -= is_probe
        assert breaker.state is State.CLOSED or breaker.retry_at <= now + 1.2 * 30.0

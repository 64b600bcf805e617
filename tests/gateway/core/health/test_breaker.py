"""The breaker: who is stopped, for how long, and how it is trusted again."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.health.breaker import AttemptVerdict, Blame, Breaker, BreakerState, blame
from tests.support.gateway.fleets import NOW
from tidegate.outcome import ERRORS, BadAnswer, InternalError, Poisonous, ServeError, Unreachable

OK, BAD, NIL = AttemptVerdict.SUCCESS, AttemptVerdict.FAILURE, AttemptVerdict.IGNORED


def opened(draw: float = 0.5) -> Breaker:
    breaker = Breaker(threshold=3, base_s=1.0, cap_s=8.0)
    for _ in range(3):
        breaker.record(BAD, NOW, draw)
    return breaker


def probe(breaker: Breaker, outcome: AttemptVerdict, now: float, draw: float = 0.5) -> None:
    assert breaker.allows(now)
    assert breaker.launched(now)
    breaker.record(outcome, now, draw, probe=True)


@pytest.mark.parametrize("error", [error("x") for error in ERRORS])
def test_an_error_counts_against_whoever_it_is_the_fault_of_and_against_nobody_else(error: ServeError) -> None:
    faults = {
        Unreachable: Blame(NIL, BAD),
        BadAnswer: Blame(BAD, NIL),
        InternalError: Blame(BAD, NIL),
        Poisonous: Blame(BAD, NIL),
    }
    assert blame(error) == faults.get(type(error), Blame(NIL, NIL))


def test_an_answer_speaks_for_the_target_and_for_the_path() -> None:
    assert blame(None) == Blame(OK, OK)


def test_failures_in_a_row_open_it_and_a_success_in_between_starts_again() -> None:
    breaker = Breaker(threshold=3)
    for outcome in (BAD, BAD, OK, BAD, NIL, BAD):
        assert not breaker.launched(NOW)
        breaker.record(outcome, NOW, 0.5)
    assert breaker.state is BreakerState.CLOSED
    assert repr(breaker) == "<Breaker CLOSED 2/3 failures>"

    breaker.record(BAD, NOW, 0.5)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows(NOW)


def test_an_open_breaker_lets_one_probe_at_a_time_through_once_it_has_cooled() -> None:
    breaker = opened()
    assert not breaker.allows(NOW + 0.99)
    assert "retry_at=1001.000" in repr(breaker)
    assert breaker.allows(NOW + 1.0)

    assert breaker.launched(NOW + 1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows(NOW + 1.0)


def test_two_good_probes_close_it_and_the_next_opening_is_short_again() -> None:
    breaker = opened()
    probe(breaker, OK, NOW + 1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    probe(breaker, OK, NOW + 1.1)
    assert breaker.state is BreakerState.CLOSED

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
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.allows(NOW + 1.0)


def test_attempts_from_before_it_opened_change_nothing() -> None:
    breaker = opened()
    breaker.record(OK, NOW + 0.1, 0.5)
    assert breaker.state is BreakerState.OPEN
    assert breaker.launched(NOW + 1.0)
    breaker.record(BAD, NOW + 1.1, 0.5)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows(NOW + 1.1)


def test_fewer_than_half_good_of_ten_open_it_though_failures_never_come_in_a_row() -> None:
    breaker = Breaker()
    for outcome in (BAD, BAD, OK, BAD, OK, BAD, BAD, OK, OK):
        breaker.record(outcome, NOW, 0.5)
    assert breaker.state is BreakerState.CLOSED, "nine calls are too few"

    breaker.record(BAD, NOW + 1.0, 0.5)
    assert breaker.state is BreakerState.OPEN
    assert breaker.reason == "6 of 10 calls failed within 10 s"


def test_half_good_is_good_enough_and_what_is_older_than_ten_seconds_is_forgotten() -> None:
    breaker = Breaker()
    for _ in range(20):
        breaker.record(OK, NOW, 0.5)
        breaker.record(BAD, NOW, 0.5)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.chance(NOW) == pytest.approx(0.5)
    assert breaker.chance(NOW + 10.0) == 0.5

    for _ in range(3):
        breaker.record(BAD, NOW + 10.0, 0.5)
    assert breaker.chance(NOW + 10.0) == pytest.approx(1 / 5)


def test_ignored_ends_are_not_calls() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.record(NIL, NOW, 0.5)
    for _ in range(4):
        breaker.record(BAD, NOW, 0.5)
    assert breaker.state is BreakerState.CLOSED


def test_a_sign_of_life_ends_the_wait_and_two_close_it() -> None:
    breaker = opened()
    breaker.heard(NOW + 0.01)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.allows(NOW + 0.01)
    breaker.heard(NOW + 0.02)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.reason == ""
    breaker.heard(NOW + 0.03)
    assert breaker.state is BreakerState.CLOSED


def test_it_may_be_tripped_by_other_evidence_and_only_once() -> None:
    breaker = Breaker(base_s=1.0)
    breaker.trip("nobody answers", NOW, 0.5)
    breaker.trip("still nobody", NOW + 0.5, 0.5)
    assert (breaker.state, breaker.reason, breaker.retry_at) == (BreakerState.OPEN, "nobody answers", NOW + 1.0)


def test_an_attempt_that_it_did_not_let_through_is_no_probe() -> None:
    breaker = opened()
    assert not breaker.launched(NOW + 0.5)
    breaker.record(BAD, NOW + 0.6, 0.5)
    assert breaker.state is BreakerState.OPEN
    assert breaker.chance(NOW + 0.6) == pytest.approx(1 / 6)


def test_whoever_is_told_of_moves_is_told_of_each_once() -> None:
    moves: list[tuple[BreakerState, float]] = []
    breaker = Breaker(threshold=1, base_s=1.0, on_move=lambda now: moves.append((breaker.state, now)))
    breaker.record(OK, NOW, 0.5)
    breaker.record(BAD, NOW, 0.5)
    probe(breaker, OK, NOW + 1.0)
    probe(breaker, OK, NOW + 1.5)
    assert moves == [(BreakerState.OPEN, NOW), (BreakerState.HALF_OPEN, NOW + 1.0), (BreakerState.CLOSED, NOW + 1.5)]


LEGAL = {
    (BreakerState.CLOSED, BreakerState.OPEN),
    (BreakerState.OPEN, BreakerState.HALF_OPEN),
    (BreakerState.HALF_OPEN, BreakerState.CLOSED),
    (BreakerState.HALF_OPEN, BreakerState.OPEN),
}
ENDS = st.sampled_from([OK, BAD, NIL, "heard", "trip"])


@pytest.mark.slow
@given(st.lists(st.tuples(ENDS, st.booleans(), st.floats(0.0, 3.0), st.floats(0.0, 1.0)), max_size=80))
def test_no_order_of_events_breaks_the_table_or_lets_two_probes_through(
    steps: list[tuple[AttemptVerdict | str, bool, float, float]],
) -> None:
    moves: list[BreakerState] = [BreakerState.CLOSED]
    breaker, now = Breaker(threshold=2, on_move=lambda _now: moves.append(breaker.state)), NOW
    probes: list[int] = []  # under way
    for what, ends_later, pause_s, draw in steps:
        now += pause_s
        if what == "heard":
            breaker.heard(now)
        elif what == "trip":
            breaker.trip("test", now, draw)
        elif not ends_later and probes:
            probes.pop()
            breaker.record(AttemptVerdict(what), now, draw, probe=True)
        else:
            is_probe = breaker.launched(now)
            if ends_later and is_probe:
                probes.append(1)
            else:
                breaker.record(AttemptVerdict(what), now, draw, probe=is_probe)
        assert len(probes) <= 1
        assert not (probes and breaker.allows(now) and breaker.state is not BreakerState.CLOSED)
        assert breaker.state is BreakerState.CLOSED or breaker.retry_at <= now + 1.2 * 30.0
    assert set(pairwise(moves)) <= LEGAL


def test_one_that_was_tripped_for_silence_is_probed_as_often_as_its_cap_says() -> None:
    breaker, now = Breaker(base_s=0.5, cap_s=30.0), NOW
    breaker.trip("silent", now, 0.5, cap_s=2.0)
    for _ in range(8):
        assert breaker.retry_at - now <= 2.0
        now = breaker.retry_at
        probe(breaker, BAD, now)
    breaker.answered_late(now)
    assert breaker.allows(now), "an answer contradicts the silence"
    breaker.answered_late(now)
    assert breaker.state is BreakerState.CLOSED


def test_an_answer_from_before_it_opened_shortens_nothing_where_calls_failed() -> None:
    breaker = opened()
    before = breaker.retry_at
    breaker.answered_late(NOW)
    assert breaker.retry_at == before
    breaker.cut_short(NOW)
    assert breaker.allows(NOW)

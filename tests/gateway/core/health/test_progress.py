"""The progress watch: a target that promises answers and gives none is found, and a slow or crowded one is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.health.progress import FORGET_S, GAP_S, LEAST_S, MOST_S, SEEN_TWICE_S, ProgressWatch

NOW = 1000.0
LATER_S = LEAST_S + 0.01


def stalls_at(watch: ProgressWatch, at: float) -> bool:
    """Whether it is stalled then, looked at as often as overdue attempts are."""
    for look in range(40, 0, -1):
        watch.is_stalled(at - 0.09 * look)
    watch.is_stalled(at - 1.01 * SEEN_TWICE_S)
    return watch.is_stalled(at)


def test_an_answer_that_is_due_and_does_not_come_is_a_stall_after_the_patience() -> None:
    watch = ProgressWatch()
    watch.due(1, NOW + 0.1, NOW)
    assert not stalls_at(watch, NOW + 0.1 + LEAST_S)
    assert stalls_at(watch, NOW + 0.1 + LATER_S + 2.0 * SEEN_TWICE_S)


def test_a_gateway_that_stood_still_itself_holds_nothing_against_anybody() -> None:
    watch = ProgressWatch()
    for attempt in range(20):
        watch.due(attempt, NOW + 0.05, NOW)
    now = NOW + 30.0  # nothing happened for so long, and then all timers ring
    for attempt in range(20):
        watch.ended(attempt, now)
    assert not watch.is_stalled(now)
    assert not watch.is_stalled(now + 1.0)


def test_one_look_is_not_enough_for_answers_may_wait_to_be_read() -> None:
    watch = ProgressWatch()
    watch.due(1, NOW, NOW)
    assert not watch.is_stalled(NOW + 60.0)
    watch.answered(1, NOW + 60.001)
    assert not watch.is_stalled(NOW + 61.0)


def test_any_answer_pays_the_debt_and_what_is_left_is_due_anew() -> None:
    watch = ProgressWatch()
    for attempt in range(8):
        watch.due(attempt, NOW, NOW)
    for attempt in range(7):
        now = NOW + (attempt + 1) * 0.9 * LEAST_S
        assert not stalls_at(watch, now)
        watch.answered(attempt, now)
    assert stalls_at(watch, now + MOST_S + LATER_S)


def test_what_is_given_up_before_it_was_due_proves_nothing() -> None:
    watch = ProgressWatch()
    for attempt in range(100):
        watch.due(attempt, NOW + attempt + 0.5, NOW + attempt)
        watch.ended(attempt, NOW + attempt + 0.4)
    assert not stalls_at(watch, NOW + 200.0)


def test_callers_with_less_time_than_the_patience_add_up() -> None:
    watch = ProgressWatch()
    for attempt in range(3):
        at = NOW + attempt
        watch.due(attempt, at + 0.1, at)
        watch.ended(attempt, at + 0.1 + 0.4 * LEAST_S)
    assert stalls_at(watch, NOW + 3.0)
    watch.progressed(NOW + 3.1)
    assert not stalls_at(watch, NOW + 4.0)


def test_time_in_which_nobody_asked_is_no_debt() -> None:
    watch = ProgressWatch()
    watch.due(1, NOW, NOW)
    watch.ended(1, NOW + 0.5 * LEAST_S)
    assert not stalls_at(watch, NOW + 5.0)
    watch.due(2, NOW + FORGET_S + 1.0, NOW + FORGET_S + 1.0)
    assert watch.overdue_s(NOW + FORGET_S + 1.0 + 0.6 * LEAST_S) < 0.7 * LEAST_S, "the old debt is void"


def test_answers_that_are_usually_late_make_it_patient_up_to_a_second() -> None:
    watch = ProgressWatch()
    for attempt in range(200):
        watch.due(attempt, NOW + attempt, NOW + attempt)
        watch.answered(attempt, NOW + attempt + 0.15)
    assert LEAST_S + 0.5 < watch.patience_s <= MOST_S
    for attempt in range(200, 500):
        watch.due(attempt, NOW + attempt, NOW + attempt)
        watch.answered(attempt, NOW + attempt - 0.1)
    assert watch.patience_s < LEAST_S + 0.01


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from(["due", "answered", "ended", "look"]), st.integers(0, 5), st.floats(0.0, 0.6)),
        max_size=60,
    )
)
def test_it_agrees_with_a_plain_account(happens: list[tuple[str, int, float]]) -> None:
    """Overdue time is the time since the last answer in which an attempt was due and under way, counted plainly."""
    watch, due, debt_s, now = ProgressWatch(), dict[int, float](), 0.0, NOW
    idle_since = counted_to = 0.0

    def counted() -> float:
        first = min(due.values(), default=None)
        return debt_s if first is None else debt_s + min(GAP_S, max(0.0, now - max(counted_to, first)))

    for what, attempt, after_s in happens:
        now += after_s
        if (what == "due") == (attempt in due) and what != "look":
            continue
        if what != "look" or now >= watch.look_at:
            debt_s, counted_to = counted(), now
        if what == "due":
            if not due and now - idle_since > FORGET_S:
                debt_s = 0.0
            due[attempt] = now + 0.2
            watch.due(attempt, now + 0.2, now)
        elif what == "answered":
            del due[attempt]
            watch.answered(attempt, now)
            debt_s, idle_since = 0.0, now
        elif what == "ended":
            del due[attempt]
            watch.ended(attempt, now)
            idle_since = now
        else:
            watch.is_stalled(now)
        assert abs(watch.overdue_s(now) - counted()) < 1e-6

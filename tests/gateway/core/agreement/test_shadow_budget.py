"""What second answers may cost: no more than one beyond the larger of two shares, whatever happens in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.agreement.shadow_budget import IDLE_SHARE, ShadowBudget

SHARE = 0.02
BEGUN_S = 0.1  # what a new budget may spend
DAY_S = 86_400.0

# Of one interval: its length, what pools compute in it for callers, and what a second answer at its end would cost.
INTERVALS = st.lists(
    st.tuples(st.floats(0.0, 200.0), st.floats(0.0, 9.0), st.floats(0.001, 5.0)), min_size=1, max_size=10
)


def played(intervals: list[tuple[float, float, float]], pools: int = 1) -> tuple[float, float, float]:
    """What was spent, and what work and time alone allow, in seconds of compute."""
    budget, now, worked_s = ShadowBudget(SHARE), 0.0, 0.0
    budget.affords(pools, now)
    for seconds, work_s, cost_s in intervals:
        now += seconds
        worked_s += work_s
        budget.worked(work_s)
        if budget.affords(pools, now):
            budget.spent(cost_s)
    return budget.spent_s, SHARE * worked_s, IDLE_SHARE * pools * now


@given(INTERVALS)
def test_the_larger_share_bounds_what_is_spent(intervals: list[tuple[float, float, float]]) -> None:
    spent_s, by_work_s, by_time_s = played(intervals)  # either allows 2 s at most: the accounts are near each other
    assert spent_s <= BEGUN_S + max(by_work_s, by_time_s) + max(cost_s for _, _, cost_s in intervals) + 1e-9


@given(st.lists(st.tuples(st.floats(0.0, 1e5), st.floats(0.0, 1e4), st.floats(0.001, 60.0)), min_size=1, max_size=60))
def test_both_shares_together_bound_it_however_long_it_goes_on(intervals: list[tuple[float, float, float]]) -> None:
    spent_s, by_work_s, by_time_s = played(intervals)
    assert spent_s <= BEGUN_S + by_work_s + by_time_s + max(cost_s for _, _, cost_s in intervals) + 1e-9


def test_where_work_and_rest_take_turns_only_the_larger_share_is_spent() -> None:
    """Seconds with work and seconds without: 2 % of the work is spent, and not the share of the time as well."""
    spent_s, by_work_s, _ = played([(10.0, work_s, 0.05) for work_s in (0.0, 2.0)] * 5000)
    assert by_work_s - 0.1 <= spent_s <= by_work_s + BEGUN_S + 0.05 + 1e-9


def test_weeks_of_rest_do_not_forbid_what_a_busy_hour_allows() -> None:
    budget = ShadowBudget(SHARE)
    for minute in range(14 * 24 * 60):
        if budget.affords(1, minute * 60.0):
            budget.spent(0.5)
    rested_s = budget.spent_s
    assert rested_s > 0.9 * IDLE_SHARE * 14 * DAY_S
    for second in range(3600):
        budget.worked(0.9)
        if budget.affords(1, 14 * DAY_S + second):
            budget.spent(0.5)
    assert budget.spent_s - rested_s > 0.9 * (SHARE * 0.9 * 3600) - 3.0


def test_one_that_cost_more_is_paid_off_before_the_next() -> None:
    budget = ShadowBudget(SHARE)
    assert budget.affords(1, 0.0)
    budget.spent(4.1)
    budget.worked(199.0)  # 3.98 of 4
    assert not budget.affords(1, 1.0)
    budget.worked(2.0)
    assert budget.affords(1, 2.0)

"""The batch choice keeps the most value in time."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.core.sharing.batch_choice import BatchCandidate, next_candidate

NOW = 100.0


def group(
    cost_s: float, due_in_s: float, *, worth: float = 1.0, guard_s: float = 0.0, member: int = 0
) -> BatchCandidate:
    return BatchCandidate((member,), cost_s, NOW + due_in_s, worth, guard_s)


def test_the_earliest_deadline_goes_first() -> None:
    soon, late = group(0.05, 0.06), group(0.05, 1.0)
    assert next_candidate([late, soon], NOW) is soon


def test_a_short_one_goes_before_a_long_one_that_can_wait_though_it_is_due_first() -> None:
    long, short = group(0.06, 0.2), group(0.01, 1.0)
    assert next_candidate([long, short], NOW) is short


def test_nobody_passes_one_who_would_be_late_for_it() -> None:
    long, short = group(0.06, 0.065), group(0.01, 1.0)
    assert next_candidate([long, short], NOW) is long


def test_a_guard_is_not_eaten_into() -> None:
    long, short = group(0.06, 0.1, guard_s=0.035), group(0.01, 1.0)
    assert next_candidate([long, short], NOW) is long


def test_whose_patience_is_over_is_passed_only_by_those_who_are_worth_more() -> None:
    long, short = group(0.06, 1.0)._replace(patient_until=NOW), group(0.01, 2.0)
    assert next_candidate([long, short], NOW) is long
    worthier = group(0.01, 2.0, worth=2.0)
    assert next_candidate([long, worthier], NOW) is worthier


def test_what_is_worth_least_for_its_time_gives_way_where_not_all_can_be_in_time() -> None:
    cheap, dear = group(0.5, 0.5, worth=0.5), group(0.1, 0.55, worth=2.0)
    assert next_candidate([cheap, dear], NOW) is dear


def test_one_who_cannot_be_in_time_does_not_take_the_turn_of_one_who_can() -> None:
    hopeless, fine = group(0.5, 0.4, worth=9.0), group(0.1, 0.6)
    assert next_candidate([hopeless, fine], NOW) is fine


def test_where_none_can_be_in_time_the_worthiest_goes() -> None:
    one, other = group(0.5, 0.4), group(0.5, 0.3, worth=2.0)
    assert next_candidate([one, other], NOW) is other


def test_under_load_what_is_still_to_come_is_counted_in() -> None:
    """There is room for both now, but not for both and the expected arrivals."""
    bulk, document = group(0.12, 0.3, worth=0.5, guard_s=0.1), group(0.1, 0.35, worth=1.0)
    assert next_candidate([bulk, document], NOW, stretch=1.0) is bulk
    assert next_candidate([bulk, document], NOW, stretch=5.0) is document


groups_lists = st.lists(
    st.builds(
        group, st.floats(0.001, 0.5), st.floats(0.0, 2.0), worth=st.floats(0.1, 9.0), guard_s=st.floats(0.0, 0.1)
    ),
    min_size=1,
    max_size=8,
)


def late(groups: list[BatchCandidate], at: float) -> int:
    count = 0
    for one in sorted(groups, key=lambda one: one.due_at):
        at += one.cost_s
        count += at > one.due_at + 1e-9
    return count


@pytest.mark.slow
@given(groups_lists, st.floats(1.0, 10.0))
def test_a_choice_makes_no_batch_late_that_would_have_been_in_time(
    groups: list[BatchCandidate], stretch: float
) -> None:
    chosen = next_candidate(groups, NOW, stretch)
    assert chosen in groups
    if late(groups, NOW) == 0 and stretch == 1.0:
        others = [one for one in groups if one is not chosen]
        assert NOW + chosen.cost_s <= chosen.due_at + 1e-9
        assert late(others, NOW + chosen.cost_s) == 0


@pytest.mark.slow
@given(groups_lists)
def test_without_load_a_feasible_order_stays_feasible_to_the_end(groups: list[BatchCandidate]) -> None:
    if late(groups, NOW):
        return
    left, at = list(groups), NOW
    while left:
        chosen = next_candidate(left, at)
        at += chosen.cost_s
        assert at <= chosen.due_at + 1e-9 < inf
        left = [one for one in left if one is not chosen]


held = st.tuples(st.floats(0.001, 1.0), st.floats(0.1, 10.0), st.floats(1.0, 1e9))


@pytest.mark.slow
@given(st.lists(held, min_size=1, max_size=8))
def test_where_memory_is_short_the_group_goes_that_is_worth_most_for_each_byte_second(
    many: list[tuple[float, float, float]],
) -> None:
    groups = [group(cost_s, 1000.0, worth=worth)._replace(held_bytes=size) for cost_s, worth, size in many]
    chosen = next_candidate(groups, NOW)
    best = max(worth / (cost_s * size) for cost_s, worth, size in many)
    assert chosen.weight / (chosen.cost_s * chosen.held_bytes) == pytest.approx(best)


@pytest.mark.slow
@given(st.lists(held, min_size=1, max_size=8), st.sampled_from([0.5, 2.0, 1024.0]))
def test_only_the_ratio_of_bytes_matters(many: list[tuple[float, float, float]], factor: float) -> None:
    groups = [group(cost_s, 1.0, worth=worth, member=n) for n, (cost_s, worth, _) in enumerate(many)]
    scaled = [one._replace(held_bytes=factor) for one in groups]
    assert next_candidate(scaled, NOW).members == next_candidate(groups, NOW).members

"""Overload: entered by evidence that lasts, left after calm that lasts, and nothing in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission.cut_level import LEVELS, CutLevel, level
from gateway.core.admission.overload import ENTER_S, LEAVE_S, MIN_DECISIONS, WINDOW_S, Overload
from gateway.core.admission.rejection import MOST, TARGET, RejectionRate

STEP_S = 0.01


def run(state: Overload, now: float, for_s: float, *, strain: float = 0.0, lost: bool = False) -> float:
    until = now + for_s - 1e-9
    while now < until:
        now += STEP_S
        state.placed(strain)
        state.attempt_ended(lost=lost)
        state.observe(now)
    return now


def test_a_standing_queue_before_every_target_is_overload() -> None:
    state = Overload()
    now = run(state, 0.0, 0.3, strain=3.0)
    assert state.on
    assert state.reason == "every target's queue takes 300% of the slack or more"
    assert "on since" in repr(state)
    run(state, now, 1.3)
    assert not state.on
    assert state.changes == 2


def test_a_queue_that_is_empty_now_and_then_is_none() -> None:
    state, now = Overload(), 0.0
    for turn in range(400):
        now += STEP_S
        state.placed(0.0 if turn % 5 == 0 else 9.0)
        state.observe(now)
    assert not state.on


def test_attempts_that_are_lost_to_queues_are_overload_though_some_targets_idle() -> None:
    state = Overload()
    run(state, 0.0, 1.0, lost=True)
    assert state.on
    assert "of attempts are lost to queues" in state.reason


def test_a_few_lost_attempts_prove_nothing() -> None:
    state, now = Overload(), 0.0
    for _ in range(50):
        now += 0.05
        state.attempt_ended(lost=True)
        state.observe(now)
    assert not state.on


def test_one_hot_window_is_not_enough_and_neither_are_two_far_apart() -> None:
    state = Overload()
    state.observe(0.0)
    for start in (0.0, 10.0):
        for place in range(MIN_DECISIONS):
            state.placed(5.0)
            state.observe(start + place * 0.001)
        state.observe(start + 5.0)
    assert not state.on


def test_what_is_still_being_shed_would_come_back_as_queues() -> None:
    state = Overload()
    now = run(state, 0.0, 0.3, strain=3.0)
    for _ in range(300):
        now += STEP_S
        state.observe(now, shedding=True)
    assert state.on
    for _ in range(110):
        now += STEP_S
        state.observe(now)
    assert not state.on


def test_shedding_alone_is_no_evidence() -> None:
    state = Overload()
    for turn in range(300):
        state.observe(turn * STEP_S, shedding=True)
    assert not state.on


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 0.4), st.floats(0.0, 5.0), st.booleans(), st.booleans()), max_size=200))
def test_it_never_flaps_within_its_hold_time(steps: list[tuple[float, float, bool, bool]]) -> None:
    state, now, turned_at = Overload(), 100.0, None
    for gap_s, strain, lost, shedding in steps:
        now += gap_s
        for _ in range(MIN_DECISIONS):
            state.placed(strain)
        for _ in range(10):
            state.attempt_ended(lost=lost)
        was = state.on
        changed = state.observe(now, shedding=shedding)
        assert changed == (was != state.on)
        if not changed:
            continue
        if turned_at is not None:
            held_s = now - turned_at
            assert held_s >= (ENTER_S - WINDOW_S if state.on else LEAVE_S) - 1e-9
        turned_at = now


# the cut


@given(
    st.lists(st.integers(0, LEVELS - 1), min_size=1, max_size=300),
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6),
)
def test_the_cut_falls_as_the_rate_rises_and_refuses_no_more_than_it(arrivals: list[int], rates: list[float]) -> None:
    cuts = []
    for rate in sorted(rates):
        cut = CutLevel()
        for one in arrivals:
            cut.record(one)
        cut.tick(rate)
        cuts.append(cut.cut)
        assert sum(cut.refuses(one) for one in arrivals) <= rate * len(arrivals) + 1e-6
    assert cuts == sorted(cuts, reverse=True)


def test_at_a_rate_of_nothing_nobody_is_refused() -> None:
    cut = CutLevel()
    cut.record(LEVELS - 1)
    cut.tick(0.0)
    assert not cut.refuses(LEVELS - 1)
    cut.tick(1.0)
    assert cut.refuses(0)
    cut.reset()
    assert not cut.refuses(LEVELS - 1)
    assert repr(cut) == "<CutLevel 500 of 500>"


def test_the_cut_follows_those_who_come_now() -> None:
    cut = CutLevel()
    for _ in range(1000):
        cut.record(450)
    for _ in range(600):  # ticks: past the point at which the counts are scaled back
        for _ in range(10):
            cut.record(100)
        cut.tick(0.5)
    assert 101 <= cut.cut <= 450
    assert not cut.refuses(100)


@pytest.mark.slow
@given(st.integers(1, 4), st.text(max_size=8), st.integers(0, 2**32), st.floats(0.0, 1e6), st.floats(0.01, 100.0))
def test_a_level_lies_in_its_prioritys_band_and_does_not_change_within_the_hour(
    priority_level: int, tenant: str, asked: int, now: float, weight: float
) -> None:
    one = level(priority_level, tenant, asked, now, weight)
    assert 125 * (priority_level - 1) <= one < 125 * priority_level
    assert one == level(priority_level, tenant, asked, 3600.0 * (now // 3600.0) + 1.0, weight)


def test_next_hour_others_have_the_bad_luck() -> None:
    assert [level(2, "acme", 1, 3600.0 * hour) for hour in range(8)].count(level(2, "acme", 1, 0.0)) < 8


def test_twice_the_weight_is_cut_half_as_often() -> None:
    def cut_of(weight: float) -> int:
        return sum(level(3, "acme", asked, 0.0, weight) >= 125 * 3 - 25 for asked in range(20_000))

    assert cut_of(2.0) == pytest.approx(cut_of(1.0) / 2, rel=0.1)


# how much


def test_a_loss_is_answered_by_refusing_and_forgotten_when_it_is_gone() -> None:
    one = RejectionRate()
    for _ in range(40):
        one.placed(0.5)
        one.placed(0.5)
        one.tick(active=True)
    high = one.rate
    assert 0.5 < high <= MOST
    for _ in range(20):  # one second
        one.placed(0.0)
        one.tick(active=True)
    assert one.rate < high / 2
    for _ in range(60):
        one.tick(active=True)
    assert one.rate == 0.0


def test_shedding_begins_with_what_would_be_lost() -> None:
    one = RejectionRate()
    for _ in range(10):
        one.placed(0.4)
    one.begin()
    assert one.rate == pytest.approx(0.4 - TARGET)
    assert repr(one) == f"<RejectionRate {one.rate:.1%} for a loss of 40.0%>"
    one.end()
    assert one.rate == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=200))
def test_the_rate_is_a_share_and_stands_while_nothing_is_shed(steps: list[tuple[float, bool]]) -> None:
    one = RejectionRate()
    for loss, active in steps:
        one.placed(loss)
        before = one.rate
        one.tick(active=active)
        assert 0.0 <= one.rate <= MOST
        assert active or one.rate == before

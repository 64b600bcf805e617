"""Adaptive control adjusts the pool without oscillating."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.core.health.adaptive_control import (
    LEAST_CAP,
    AdaptiveControl,
    ControlAction,
    ControlLimits,
    ControlReadings,
)

CALM = ControlReadings(busy_ratio=0.7, memory_ratio=0.4, p99_ratio=0.2, batch_ratio=0.1, workers=2)
LIMITS = ControlLimits()
FULL_MEMORY = replace(CALM, memory_ratio=0.95)
LONG_BATCHES = replace(CALM, p99_ratio=1.5, batch_ratio=0.8)
LONG_QUEUE = replace(CALM, p99_ratio=1.5, batch_ratio=0.2, busy_ratio=0.99)


def looks(
    subject: AdaptiveControl, seen: ControlReadings, seconds: float, *, since: float = 0.0
) -> list[ControlAction]:
    """A look every 10 s."""
    return [action for n in range(int(seconds / 10)) for action in subject.decide(seen, since + 10.0 * n)]


def test_in_ordinary_times_nothing_is_turned() -> None:
    subject = AdaptiveControl(LIMITS)
    assert looks(subject, CALM, 1000) == []
    assert repr(subject) == "<AdaptiveControl batches x1, 0 held back, full precision>"


class TestBatchCap:
    def test_it_is_halved_when_batches_make_answers_late_and_each_step_is_watched(self) -> None:
        subject = AdaptiveControl(LIMITS)
        turned = looks(subject, LONG_BATCHES, 300)
        assert [action.value for action in turned] == [1 / 2, 1 / 4, LEAST_CAP]
        assert turned[0] == ControlAction("batch_cap", 0.5, "p99 150% of its target, batches 80%")

    @pytest.mark.parametrize("better", [replace(CALM, busy_ratio=0.2, p99_ratio=0.9), CALM])
    def test_it_is_raised_when_the_device_idles_or_answers_are_well_in_time(self, better: ControlReadings) -> None:
        subject = AdaptiveControl(LIMITS)
        looks(subject, LONG_BATCHES, 100)
        assert [action.value for action in looks(subject, better, 200, since=200.0)] == [1 / 4, 1 / 2, 1.0]

    def test_where_it_is_the_queue_that_makes_answers_late_larger_batches_get_more_done(self) -> None:
        subject = AdaptiveControl(LIMITS)
        assert looks(subject, LONG_QUEUE, 100) == []
        looks(subject, LONG_BATCHES, 10)
        (raised,) = looks(subject, LONG_QUEUE, 60, since=100.0)
        assert raised == ControlAction("batch_cap", 1.0, "p99 150% of its target by waiting")

    def test_between_late_and_calm_it_stays(self) -> None:
        subject = AdaptiveControl(LIMITS)
        looks(subject, LONG_BATCHES, 10)
        assert looks(subject, replace(CALM, p99_ratio=0.8, batch_ratio=0.6), 1000, since=100.0) == []

    def test_without_a_target_latency_turns_nothing(self) -> None:
        assert looks(AdaptiveControl(LIMITS), replace(LONG_BATCHES, p99_ratio=0.0, batch_ratio=0.0), 1000) == []


class TestMemory:
    def test_fewer_workers_compute_at_once_and_then_smaller_batches(self) -> None:
        subject = AdaptiveControl(LIMITS)
        turned = looks(subject, FULL_MEMORY, 200)
        assert [(action.knob, action.value) for action in turned[:3]] == [
            ("concurrency", 1.0),
            ("batch_cap", 0.5),
            ("batch_cap", 0.25),
        ]
        assert turned[0].reason == "memory 95%, over 90%"
        assert (subject.concurrency(2), subject.concurrency(1)) == (1, 1)

    def test_they_come_back_one_by_one_when_it_has_fallen_enough(self) -> None:
        subject = AdaptiveControl(LIMITS)
        four = replace(FULL_MEMORY, workers=4)
        looks(subject, four, 90)
        assert subject.concurrency(4) == 1
        assert looks(subject, replace(four, memory_ratio=0.85), 100, since=100.0) == [], "not enough"
        back = looks(subject, replace(four, memory_ratio=0.5), 200, since=200.0)
        assert [action.value for action in back if action.knob == "concurrency"] == [2.0, 3.0, 4.0]


class TestPrecision:
    ALLOWED = replace(LIMITS, may_degrade=True)

    def test_precision_is_never_lessened_where_it_is_not_allowed(self) -> None:
        assert looks(AdaptiveControl(LIMITS), LONG_QUEUE, 10_000) == []

    def test_it_is_lessened_when_answers_stay_late_with_nothing_else_to_turn(self) -> None:
        subject = AdaptiveControl(self.ALLOWED)
        assert looks(subject, LONG_QUEUE, 60) == []
        assert subject.decide(LONG_QUEUE, 60.0) == [ControlAction("precision", 0.0, "p99 150% of its target")]
        assert subject.degraded
        assert "lesser" in repr(subject)

    def test_smaller_batches_are_tried_first(self) -> None:
        turned = looks(AdaptiveControl(self.ALLOWED), LONG_BATCHES, 200)
        assert [action.knob for action in turned] == ["batch_cap"] * 3 + ["precision"]

    def test_where_all_workers_are_always_busy_no_smaller_batch_is_waited_for(self) -> None:
        subject = AdaptiveControl(replace(LIMITS, may_degrade=True))
        turned = looks(subject, replace(LONG_BATCHES, busy_ratio=1.0), 300)
        assert [action.knob for action in turned] == ["precision"]
        assert subject.degraded

    def test_a_late_moment_is_not_enough(self) -> None:
        subject = AdaptiveControl(self.ALLOWED)
        for n in range(100):
            assert looks(subject, LONG_QUEUE, 50, since=100.0 * n) == []
            assert looks(subject, CALM, 50, since=100.0 * n + 50.0) == []

    def test_it_comes_back_when_answers_are_in_time_and_the_full_one_would_fit(self) -> None:
        subject = AdaptiveControl(self.ALLOWED)
        looks(subject, LONG_QUEUE, 100)
        busy = replace(CALM, busy_ratio=0.6, full_cost_ratio=1.6)
        assert looks(subject, busy, 1000, since=100.0) == [], "it would be late again at once"
        (back,) = looks(subject, replace(busy, busy_ratio=0.4), 100, since=2000.0)
        assert back == ControlAction("precision", 1.0, "p99 20% of its target, busy 40%")
        assert not subject.degraded

    def test_silence_is_calm(self) -> None:
        subject = AdaptiveControl(self.ALLOWED)
        looks(subject, LONG_QUEUE, 100)
        (back,) = looks(subject, replace(CALM, p99_ratio=None, busy_ratio=0.0), 100, since=200.0)
        assert back.reason == "p99 of too few answers, busy 0%"


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1),
            st.floats(0, 1),
            st.one_of(st.none(), st.floats(0, 1)),
            st.floats(0, 1),
            st.integers(1, 4),
            st.booleans(),
        ),
        max_size=80,
    ),
    st.booleans(),
)
def test_whatever_is_seen_knobs_stay_in_their_range_and_rest_between_turns(rows: list, allowed: bool) -> None:  # type: ignore[type-arg]
    subject, turned_at = AdaptiveControl(replace(LIMITS, may_degrade=allowed)), dict[str, float]()
    for n, (busy, memory, p99, batch, workers, _) in enumerate(rows):
        now = 10.0 * n
        for action in subject.decide(ControlReadings(busy, memory, p99, batch, workers, 1.6), now):
            assert now - turned_at.get(action.knob, -inf) >= LIMITS.dwell_s
            turned_at[action.knob] = now
        assert subject.batch_cap_ratio in (1.0, 0.5, 0.25, LEAST_CAP)
        assert 1 <= subject.concurrency(workers) <= workers
        assert allowed or not subject.degraded

"""The arrival rate predicts load and tightness from recent arrivals."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.core.batching.arrival_rate import LOAD_S, MARGINAL_RATIO, MAX_STRETCH, ArrivalRate


def test_nobody_came_yet() -> None:
    subject = ArrivalRate()
    assert subject.load(5.0) == 0.0
    assert subject.stretch(5.0) == 1.0
    assert subject.tight_s == inf


def test_the_load_is_what_comes_a_second_and_fades() -> None:
    subject = ArrivalRate()
    for step in range(1_000):
        subject.record(0.005, 0.1, step * 0.01)
    assert subject.load(9.99) == pytest.approx(0.5 * MARGINAL_RATIO, rel=0.02)
    assert subject.stretch(9.99) == pytest.approx(1.0 / (1.0 - subject.load(9.99)))
    assert subject.load(9.99 + 5 * LOAD_S) < 0.01


def test_an_overloaded_device_stretches_time_to_a_limit() -> None:
    subject = ArrivalRate()
    for step in range(100):
        subject.record(1.0, 0.1, step * 0.01)
    assert subject.stretch(1.0) == MAX_STRETCH
    assert "tight ones have" in repr(subject)


def test_one_in_ten_that_is_tight_is_enough_to_be_seen() -> None:
    subject = ArrivalRate()
    for step in range(2_000):
        subject.record(0.001, 0.1 if step % 4 == 0 else 1.2, step * 0.01)
    assert subject.tight_s < 0.2


def test_a_rare_tight_one_is_not() -> None:
    subject = ArrivalRate()
    for step in range(2_000):
        subject.record(0.001, 0.1 if step % 50 == 0 else 1.2, step * 0.01)
    assert subject.tight_s > 0.8


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(-1.0, 5.0), st.floats(-1.0, 1.0)), max_size=50))
def test_whatever_comes_the_stretch_is_bounded(arrivals: list[tuple[float, float, float]]) -> None:
    subject, now = ArrivalRate(), 10.0
    for work_s, slack_s, step in arrivals:
        now += step
        subject.record(work_s, slack_s, now)
        assert 1.0 <= subject.stretch(now) <= MAX_STRETCH
        assert subject.tight_s > 0.0


def test_what_several_workers_share_takes_each_of_them_its_part_of_the_time() -> None:
    subject = ArrivalRate()
    assert subject.stretch(0.0, workers=2) == 0.5
    for n in range(200):
        subject.record(0.02 / MARGINAL_RATIO, 1.0, 0.02 * n)
    busy_at = 4.0
    assert subject.stretch(busy_at) == MAX_STRETCH, "one would drown"
    assert subject.stretch(busy_at, workers=4) == pytest.approx(1 / 0.75 / 4, rel=0.1)

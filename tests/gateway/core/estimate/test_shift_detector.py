"""Sums of small evidence, shifts of what is normal, and trends."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.cusum import Cusum
from gateway.core.estimate.shift_detector import Shift
from gateway.core.health.detectors import SLOW_CLIP, SLOW_LEVEL, SLOW_SLACK
from tidegate.estimate.trend import TREND_LEAST, Leak, grows, sen_slope

samples = st.lists(st.floats(-50.0, 50.0), max_size=300)


def shift() -> Shift:
    return Shift(slack=SLOW_SLACK, level=SLOW_LEVEL, clip=SLOW_CLIP)


@given(samples)
def test_the_sum_stays_within_its_ends_and_the_verdict_changes_only_there(values: list[float]) -> None:
    cusum = Cusum(slack=0.2, level=3.0, clip=1.0)
    for value in values:
        before = cusum.on
        changed = cusum.record(value)
        assert 0.0 <= cusum.sum <= 3.0
        assert changed is (cusum.on is not before)
        if changed:
            assert cusum.sum == (3.0 if cusum.on else 0.0)


@given(st.floats(1.0, 1e6))
def test_one_sample_alone_never_alarms_however_far_off_it_is(value: float) -> None:
    cusum = Cusum(slack=0.2, level=3.0, clip=1.0)
    assert not cusum.record(value)


def test_nothing_is_said_before_it_is_known_what_is_normal() -> None:
    subject = shift()
    for _ in range(59):
        assert not subject.record(5.0)
    assert not subject.known
    assert subject.excess == 0.0


@pytest.mark.parametrize("normal", [-1.0, 0.0, 0.6, 3.0])
def test_half_as_slow_again_is_found_within_sixty_samples_wherever_normal_is(normal: float) -> None:
    for seed in range(20):
        subject, draw = shift(), Random(seed)
        for _ in range(400):
            subject.record(normal + draw.gauss(0.0, 0.15))
        assert not subject.on
        took = 1
        while not subject.record(normal + 0.405 + draw.gauss(0.0, 0.15)):
            took += 1
        assert took <= 60
        assert subject.excess > 0.15


def test_samples_that_an_alarm_is_made_of_are_no_part_of_normal() -> None:
    subject = shift()
    for _ in range(100):
        subject.record(0.0)
    for _ in range(500):
        subject.record(0.45)
    assert subject.on
    assert subject.normal == pytest.approx(0.0)


def test_a_shift_that_ends_is_over_after_a_bounded_number_of_usual_samples() -> None:
    subject = shift()
    for value in [0.0] * 100 + [2.0] * 5000:
        subject.record(value)
    assert subject.on
    ended = [subject.record(0.0) for _ in range(40)]
    assert ended.count(True) == 1
    assert not subject.on


def test_a_tenth_of_samples_that_are_ten_times_off_do_not_move_normal_far() -> None:
    subject, draw = shift(), Random(1)
    for _ in range(1000):
        subject.record(3.0 if draw.random() < 0.1 else draw.gauss(0.0, 0.1))
    assert abs(subject.normal) < 0.15


def test_what_grows_grows_and_what_jumps_about_does_not() -> None:
    draw = Random(3)
    flat = [draw.gauss(0.0, 1.0) for _ in range(60)]
    assert not grows(flat)
    assert grows([value + 0.1 * n for n, value in enumerate(flat)])
    assert sen_slope([(float(n), 2.0 * n + (500.0 if n == 7 else 0.0)) for n in range(30)]) == pytest.approx(2.0)


def test_a_leak_is_told_with_the_time_that_is_left() -> None:
    leak = Leak()
    for minute in range(TREND_LEAST + 5):
        leak.record(60.0, 100e6 + 1e6 * minute)
    assert leak.limit_in_s(160e6) == pytest.approx(60.0 * (60 - TREND_LEAST - 4), rel=0.05)
    assert repr(shift()).startswith("<Shift")

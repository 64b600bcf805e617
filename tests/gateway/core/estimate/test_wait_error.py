"""How far waits were off: the factor finds the true ratio, the spread what is left, and both have bounds."""

from __future__ import annotations

from math import sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.wait_error import MAX_FACTOR, MIN_FACTOR, WaitError

waits = st.floats(0.0, 100.0)


def learned(*pairs: tuple[float, float]) -> WaitError:
    error = WaitError()
    for predicted_s, observed_s in pairs:
        error.record(predicted_s, observed_s)
    return error


def test_before_anything_is_known_a_wait_is_what_is_predicted_give_or_take_a_third() -> None:
    fresh = WaitError()
    assert fresh.factor == 1.0
    assert sqrt(fresh.variance(0.100)) == pytest.approx(0.030, rel=0.01)
    assert sqrt(fresh.variance(0.0)) == pytest.approx(0.001)
    assert repr(fresh) == "<WaitError × 1.00 ± 0.30>"


@given(st.floats(MIN_FACTOR, MAX_FACTOR), st.integers(0, 2**16))
def test_the_factor_converges_to_the_true_ratio(ratio: float, seed: int) -> None:
    chance, error = Random(seed), WaitError()
    for _ in range(300):
        predicted_s = chance.uniform(0.050, 0.400)
        error.record(predicted_s, ratio * predicted_s)
    assert error.factor == pytest.approx(ratio, rel=0.05, abs=0.01)
    assert sqrt(error.variance(0.100)) < 0.01, "who is always off by the same is sure of himself"


def test_a_change_is_followed_within_some_hundred_answers() -> None:
    error = learned(*[(0.100, 0.100)] * 300, *[(0.100, 0.050)] * 150)
    assert error.factor == pytest.approx(0.5, abs=0.05)


def test_noise_is_in_the_spread_and_not_in_the_factor() -> None:
    chance = Random(3)
    error = learned(*[(0.100, 0.100 + chance.gauss(0.0, 0.020)) for _ in range(1000)])
    assert error.factor == pytest.approx(1.0, abs=0.1)
    assert sqrt(error.variance(0.100)) == pytest.approx(0.020, rel=0.5)


def test_where_hardly_any_wait_was_predicted_only_the_floor_is_learned() -> None:
    error = learned(*[(0.001, 0.015)] * 300)
    assert error.factor == 1.0
    assert sqrt(error.variance(0.0)) == pytest.approx(0.015, rel=0.05)
    assert error.variance(1.0) == pytest.approx(WaitError().variance(1.0), rel=0.01)


def test_the_floor_comes_down_again_but_never_below_a_timers_worth() -> None:
    error = learned(*[(0.001, 9.0)] * 300)
    assert sqrt(error.variance(0.0)) <= 0.031, "one that was far off says no more than that"
    for _ in range(1000):
        error.record(0.0, 0.0)
    assert error.variance(0.0) == pytest.approx(0.001**2)


@pytest.mark.slow
@given(st.lists(st.tuples(waits, waits | st.just(float("inf"))), max_size=60), waits)
def test_whatever_was_told_the_factor_has_bounds_and_variances_are_above_zero(
    pairs: list[tuple[float, float]], predicted_s: float
) -> None:
    error = learned(*pairs)
    assert MIN_FACTOR <= error.factor <= MAX_FACTOR
    assert 0.0 < error.variance(predicted_s) < float("inf")
    assert error.variance(predicted_s + 1.0) >= error.variance(predicted_s)

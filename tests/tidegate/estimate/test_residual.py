"""How predictions are corrected by what was observed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.estimate.residual import COLD_COUNT, COLD_SIGMA, FLOOR_SIGMA, MAX_FACTOR, MIN_FACTOR, LogResidual


def residual_after(*observed_s: float, predicted_s: float = 0.010) -> LogResidual:
    residual = LogResidual()
    for seconds in observed_s:
        residual.record(predicted_s, seconds)
    return residual


def test_nothing_observed_changes_nothing() -> None:
    assert LogResidual().factor == 1.0
    assert LogResidual().sigma == COLD_SIGMA


@pytest.mark.parametrize(("ratio", "calls"), [(2.0, 40), (0.5, 40), (5.0, 60)])
def test_a_lasting_change_of_speed_is_learned_within_tens_of_calls(ratio: float, calls: int) -> None:
    residual = residual_after(*[0.010 * ratio] * calls)

    assert residual.factor == pytest.approx(ratio, rel=0.1)


def test_a_single_page_fault_does_not_reprice_a_device() -> None:
    steady = residual_after(*[0.010] * 50)

    steady.record(0.010, 10.0)

    assert steady.factor < 1.06


def test_a_device_that_does_as_predicted_is_trusted_more_with_time() -> None:
    residual = residual_after(*[0.010] * 200)

    assert residual.sigma == pytest.approx(FLOOR_SIGMA, rel=0.01)


def test_a_new_device_is_not_trusted_before_it_has_answered_often_enough() -> None:
    residual = residual_after(*[0.010] * (COLD_COUNT - 1))
    assert residual.sigma == COLD_SIGMA

    residual.record(0.010, 0.010)

    assert residual.sigma < COLD_SIGMA


def test_an_erratic_device_is_known_by_its_spread() -> None:
    residual = residual_after(*[0.005, 0.020] * 100)

    assert residual.factor == pytest.approx(1.0, abs=0.1)
    assert residual.sigma == pytest.approx(0.71, abs=0.1)  # log 2, and the floor


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6))))
def test_whatever_is_recorded_the_correction_stays_bounded(calls: list[tuple[float, float]]) -> None:
    residual = LogResidual()
    for predicted_s, observed_s in calls:
        residual.record(predicted_s, observed_s)

        assert MIN_FACTOR <= residual.factor <= MAX_FACTOR
        assert residual.sigma >= FLOOR_SIGMA
    assert residual.count == len(calls)


def test_it_prints_what_it_learned() -> None:
    assert repr(LogResidual()) == "<LogResidual x1.00 sigma 0.25 after 0 calls>"

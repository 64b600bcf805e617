"""Chances that keep their word: bins, the monotone shift, and what settles a prediction."""

from __future__ import annotations

import random
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.calibration import CENTRES, Calibration, Prediction, ReliabilityBins, TargetBias, apply_curve

chances = st.floats(0.0, 1.0)
outcomes = st.lists(st.tuples(chances, st.booleans()), max_size=200)


def learned(truth: dict[float, float], count: int = 3000, seed: int = 1) -> Calibration:
    """A calibration that saw `said → true share` at random."""
    calibration, chance = Calibration(), Random(seed)
    for _ in range(count):
        said = chance.choice(list(truth))
        claimed = apply_curve(said, calibration.curve)
        calibration.record(said, claimed, chance.random() < truth[said])
    return calibration


@given(chances)
def test_without_outcomes_a_chance_is_taken_at_its_word(chance: float) -> None:
    assert apply_curve(chance, Calibration().curve) == pytest.approx(chance)


@pytest.mark.slow
@given(outcomes, chances, chances)
def test_a_calibrated_chance_is_a_chance_and_keeps_the_order(
    seen: list[tuple[float, bool]], one: float, other: float
) -> None:
    reliability = ReliabilityBins()
    for said, came in seen:
        reliability.record(said, came)
    curve = reliability.curve()
    assert list(curve) == sorted(curve)
    low, high = sorted((one, other))
    assert 0.0 <= apply_curve(low, curve) <= apply_curve(high, curve) + 1e-12 <= 1.0 + 1e-12
    assert 0.0 <= reliability.ece <= 1.0


@pytest.mark.parametrize(
    ("said", "came"),
    [(0.04, 0.45), (0.30, 0.60), (0.97, 0.90), (0.99, 0.80)],  # the first: what an overloaded fleet showed
)
def test_a_habitual_error_is_unlearned(said: float, came: float) -> None:
    calibration = learned({said: came})
    assert apply_curve(said, calibration.curve) == pytest.approx(came, abs=0.06)
    assert calibration.raw.ece > 0.05
    assert calibration.claimed.ece < 0.08  # which includes what was claimed before anything was learned


def test_several_errors_are_unlearned_at_once_and_the_claims_are_reliable() -> None:
    calibration = learned({0.1: 0.4, 0.5: 0.6, 0.9: 0.8, 0.99: 0.97}, count=8000)
    assert calibration.raw.ece > 0.10
    assert calibration.claimed.ece < 0.04
    assert "claimed <ReliabilityBins ece" in repr(calibration)


def test_a_change_is_followed_within_some_hundred_outcomes() -> None:
    calibration = learned({0.9: 0.9})
    for _ in range(500):
        calibration.record(0.9, 0.9, came=False)
    assert apply_curve(0.9, calibration.curve) < 0.3


def test_few_outcomes_move_little() -> None:
    calibration = Calibration()
    for _ in range(8):
        calibration.record(0.975, 0.975, came=False)
    assert 0.4 < apply_curve(0.975, calibration.curve) < 0.7


def test_the_order_within_a_bin_is_kept() -> None:
    curve = learned({0.97: 0.90}).curve
    assert apply_curve(0.999, curve) - apply_curve(0.98, curve) == pytest.approx(0.019)


def test_bins_that_contradict_each_other_are_pooled() -> None:
    reliability = ReliabilityBins()
    for _ in range(100):
        reliability.record(0.325, True)
        reliability.record(0.375, False)
    curve = reliability.curve()
    assert curve[6] == curve[7]
    assert curve[6] == pytest.approx(0.5, abs=0.05)


def test_the_reliability_diagram_shows_only_what_was_said() -> None:
    reliability = ReliabilityBins()
    assert reliability.bins() == ()
    assert reliability.ece == 0.0
    for came in (True, True, False, False):
        reliability.record(1.0, came)
    ((said, share, weight),) = reliability.bins()
    assert said == pytest.approx(1.0)
    assert share == pytest.approx(0.5, abs=0.01)
    assert weight == pytest.approx(4.0, abs=0.03)


@pytest.mark.parametrize(
    ("end", "recorded"),
    [
        (lambda one: one.answered(9.9), [(0.9, 1.0)]),
        (lambda one: one.answered(10.1), [(0.9, 0.0)]),
        (lambda one: one.failed(9.0), [(0.9, 0.0)]),
        (lambda one: one.given_up(9.9995), [(0.9, 0.0)]),
        (lambda one: one.given_up(5.0), []),
    ],
)
def test_only_what_is_known_settles_a_prediction(end: object, recorded: list[tuple[float, float]]) -> None:
    calibration = Calibration()
    end(Prediction(0.8, 0.9, 10.0, calibration, TargetBias()))  # type: ignore[operator]
    assert [one[:2] for one in calibration.claimed.bins()] == recorded


def test_the_curve_of_nothing_is_the_centres() -> None:
    assert ReliabilityBins().curve() == CENTRES


def test_a_target_that_keeps_its_claims_has_no_bias_whatever_luck_it_has() -> None:
    draws = random.Random(3)
    bias, shifts = TargetBias(), []
    for number in range(2000):
        bias.record(0.9, draws.random() < 0.9, 0.1 * number)
        shifts.append(bias.shift)
    assert min(shifts) > -0.12
    assert sum(shift == 0.0 for shift in shifts) > 0.85 * len(shifts)


def test_one_that_has_stopped_is_claimed_for_less_at_once_and_forgiven_with_time() -> None:
    bias = TargetBias()
    for number in range(100):
        bias.record(0.95, True, 0.1 * number)
    for number in range(6):
        bias.record(0.95, False, 10.0 + 0.1 * number)
    assert bias.shift < -0.05
    for second in range(60):
        bias.relax(10.0 + second)
    assert bias.shift == 0.0 or bias.shift > -0.01


def test_what_is_a_targets_fault_is_kept_from_what_all_share() -> None:
    calibration, bias = Calibration(), TargetBias()
    for _ in range(50):
        Prediction(0.95, 0.95, 10.0, calibration, bias).given_up(10.0, is_fault=True)
    assert calibration.raw.bins() == ()
    assert bias.shift < -0.5

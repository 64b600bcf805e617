"""The sequential tests: how soon a drift is seen, that agreement accuses nothing, and when a device is back."""

from __future__ import annotations

from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.agreement.drift_test import DriftTest, ReturnTest, bounded

LIMIT = 0.02
ALARM_AT = 500_000.0


def found_after(score: float, limit: float = LIMIT, most: int = 2000) -> int | None:
    """After how many equal scores the evidence suffices; None where it never does."""
    test = DriftTest(limit)
    for number in range(1, most + 1):
        if test.record(score) >= ALARM_AT:
            return number
    return None


def back_after(test: ReturnTest, score: float, most: int = 2000) -> int | None:
    for number in range(1, most + 1):
        test.record(score)
        if test.returns:
            return number
    return None


@pytest.mark.parametrize(
    ("score", "at_most"),
    [(1.0, 5), (0.4, 8), (0.1, 12), (0.06, 20), (0.04, 40), (0.03, 90)],
)
def test_a_drift_is_seen_the_sooner_the_larger_it_is(score: float, at_most: int) -> None:
    found = found_after(score)
    assert found is not None and found <= at_most


@pytest.mark.parametrize("score", [0.0, 0.005, 0.01, 0.02])
def test_scores_up_to_the_limit_are_never_evidence(score: float) -> None:
    assert found_after(score) is None


def test_evidence_begins_anew_with_each_score_so_that_a_long_good_life_delays_nothing() -> None:
    test = DriftTest(LIMIT)
    for _ in range(50_000):
        test.record(0.008)
    for _ in range(8):
        test.record(0.4)
    assert test.evidence >= ALARM_AT


def test_the_evidence_of_n_scores_whose_mean_is_on_the_limit_is_n_on_average() -> None:
    draw, count, lives = Random(5), 30, 20_000
    total = 0.0
    for _ in range(lives):
        test = DriftTest(0.5)
        for _ in range(count):
            test.record(1.0 if draw.random() < 0.5 else 0.0)
        total += test.evidence
    assert total / lives <= 1.2 * count


@pytest.mark.parametrize("score", [nan, inf, -inf, -0.1, 1.5])
def test_what_is_no_score_counts_as_no_agreement_at_all(score: float) -> None:
    assert bounded(score) == 1.0
    assert found_after(score) == found_after(1.0)


@given(st.lists(st.floats(), max_size=200), st.floats(0.001, 0.5))
def test_evidence_is_a_finite_number_whatever_comes(scores: list[float], limit: float) -> None:
    drift, back = DriftTest(limit), ReturnTest(limit, [0.5])
    for score in scores:
        back.record(score)
        assert 0.0 <= drift.record(score) < inf
    assert back.agreed >= 0


@pytest.mark.parametrize(("was", "at_most"), [(0.9, 30), (0.3, 40), (0.05, 60)])
def test_a_repaired_device_is_back_within_some_dozens_of_answers(was: float, at_most: int) -> None:
    found = back_after(ReturnTest(LIMIT, [was]), 0.008)
    assert found is not None and found <= at_most


@pytest.mark.parametrize("was", [1.0, 0.3, 0.06])
def test_a_device_that_is_as_wrong_as_before_does_not_come_back(was: float) -> None:
    assert back_after(ReturnTest(LIMIT, [was]), was) is None


def test_a_fault_that_shows_in_some_inputs_only_does_not_come_back_between_them() -> None:
    draw, test = Random(1), ReturnTest(LIMIT, [0.008] * 27 + [1.0] * 5)
    for _ in range(2000):
        test.record(1.0 if draw.random() < 0.15 else 0.008)
        assert not test.returns


def test_a_classifier_that_still_errs_does_not_come_back_and_a_repaired_one_does() -> None:
    draw, ill = Random(2), ReturnTest(0.04, [0.3], all_or_nothing=True)
    for _ in range(1000):
        ill.record(1.0 if draw.random() < 0.3 else 0.0)
        assert not ill.returns
    well = ReturnTest(0.04, [0.3], all_or_nothing=True)
    found = next(number for number in range(1000) if well.record(1.0 if draw.random() < 0.02 else 0.0) or well.returns)
    assert found < 100


def test_each_relapse_asks_for_more_evidence() -> None:
    first, third = (back_after(ReturnTest(LIMIT, [0.5], relapses=times), 0.008) for times in (0, 2))
    assert first is not None and third is not None and third > first


def test_they_say_how_far_they_are() -> None:
    assert repr(DriftTest(0.02)) == "<DriftTest 0 against a mean of 0.02>"
    test = ReturnTest(0.02, [0.5])
    assert repr(test) == "<ReturnTest 0 in a row>"
    back_after(test, 0.0)
    assert repr(test).endswith("in a row, agrees>")

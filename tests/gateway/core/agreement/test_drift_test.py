"""The sequential test of drift: how soon one is seen, and that agreement accuses nothing."""

from __future__ import annotations

from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.agreement.drift_test import DriftTest, bounded

LIMIT = 0.02
ALARM_AT = 500_000.0


def found_after(score: float, limit: float = LIMIT, most: int = 2000) -> int | None:
    """After how many equal scores the evidence suffices; None where it never does."""
    test = DriftTest(limit)
    for number in range(1, most + 1):
        if test.record(score) >= ALARM_AT:
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


@pytest.mark.slow
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
    test = DriftTest(limit)
    for score in scores:
        assert 0.0 <= test.record(score) < inf


def test_it_says_how_far_it_is() -> None:
    assert repr(DriftTest(0.02)) == "<DriftTest 0 against a mean of 0.02>"

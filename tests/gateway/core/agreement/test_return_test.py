"""The sequential test of a demoted device: when it is back, and that what is as wrong as before stays out."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.agreement.return_test import ReturnTest

LIMIT = 0.02


def back_after(test: ReturnTest, score: float, most: int = 2000) -> int | None:
    for number in range(1, most + 1):
        test.record(score)
        if test.returns:
            return number
    return None


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


def test_a_device_that_changed_a_little_has_a_level_of_its_own_and_one_that_was_far_off_has_not() -> None:
    assert back_after(ReturnTest(LIMIT, [0.018], level=0.0145), 0.016) is None
    assert back_after(ReturnTest(LIMIT, [0.018]), 0.016) is not None
    assert back_after(ReturnTest(LIMIT, [0.018], level=0.0145), 0.008) is not None
    assert back_after(ReturnTest(LIMIT, [0.5], level=0.0145), 0.016) is not None


def test_each_relapse_asks_for_more_evidence() -> None:
    first, third = (back_after(ReturnTest(LIMIT, [0.5], relapses=times), 0.008) for times in (0, 2))
    assert first is not None and third is not None and third > first


@given(st.lists(st.floats(), max_size=200), st.floats(0.001, 0.5))
def test_it_takes_whatever_comes(scores: list[float], limit: float) -> None:
    test = ReturnTest(limit, [0.5])
    for score in scores:
        test.record(score)
    assert test.agreed >= 0


def test_it_says_how_far_it_is() -> None:
    test = ReturnTest(0.02, [0.5])
    assert repr(test) == "<ReturnTest 0 in a row>"
    back_after(test, 0.0)
    assert repr(test).endswith("in a row, agrees>")

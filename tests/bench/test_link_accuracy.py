"""The bench of links counts as it says."""

from __future__ import annotations

import pytest

from tests.bench.link_accuracy import allows, compare, quantile
from tidegate.netsim.links.trace import CapacityTrace

SECOND = CapacityTrace([number / 100 for number in range(1, 101)])  # 100 packets a second


def test_a_recording_allows_what_has_come_in_all_its_rounds() -> None:
    assert [allows(SECOND, at) for at in (0.0, 0.015, 1.0, 2.5)] == [0, 1500, 150_000, 375_000]


def test_what_comes_exactly_as_allowed_has_no_error() -> None:
    seen = [(50.0 + number / 100, 1500) for number in range(1, 301)]
    assert compare(seen, SECOND, 50.0, 3.0) == {"volume": 1.0, "mean_error": 0.0, "worst_error": 0.0}


def test_a_second_that_is_short_shows_in_the_worst_and_less_in_the_mean() -> None:
    seen = [(50.0 + number / 100, 1500) for number in range(1, 301) if not 110 < number <= 120]
    found = compare(seen, SECOND, 50.0, 3.0)
    assert found == pytest.approx({"volume": 290 / 300, "mean_error": 0.1 / 3, "worst_error": 0.1})


def test_seconds_below_half_a_megabit_do_not_count() -> None:
    slow = CapacityTrace([0.5, 1.0])
    assert compare([], slow, 0.0, 3.0) == {"volume": 0.0, "mean_error": 0.0, "worst_error": 0.0}


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0

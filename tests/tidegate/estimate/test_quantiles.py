"""Quantiles are observed values, whether they are looked up in a list or in counted bins."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.estimate.quantiles import bins_at, nearest_rank


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [
        (1, 0.5, 0),
        (1, 1.0, 0),
        (2, 0.5, 1),
        (4, 0.5, 2),
        (20, 0.95, 19),
        (100, 0.99, 99),
        (101, 0.99, 99),
        (10, 0.0, 0),
    ],
)
def test_the_nearest_rank_is_the_place_below_the_share(count: int, share: float, expected: int) -> None:
    assert nearest_rank(range(count), share) == expected


@pytest.mark.parametrize(
    ("counts", "shares", "expected"),
    [
        ({}, (0.5,), []),
        ({7: 1}, (0.5, 0.95, 0.99), [7, 7, 7]),
        ({3: 50, 1: 50}, (0.5, 0.51, 1.0), [1, 3, 3]),
        ({0: 95, 9: 4, 12: 1}, (0.5, 0.95, 0.99, 1.0), [0, 0, 9, 12]),
    ],
)
def test_a_share_is_reached_in_the_first_bin_that_completes_it(
    counts: dict[int, int], shares: tuple[float, ...], expected: list[int]
) -> None:
    assert bins_at(counts, shares) == expected


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 100))
def test_bins_agree_with_the_sorted_list(places: list[int], percent: int) -> None:
    rank = max(1, ceil(percent / 100 * len(places)))
    assert bins_at(Counter(places), (percent / 100,)) == [sorted(places)[rank - 1]]

"""The limit: never more than its number, and an estimate of when to come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.world.limit import ConcurrencyLimit


def test_places_are_given_until_there_are_none_and_come_back() -> None:
    limit = ConcurrencyLimit(2)
    assert [limit.try_acquire() for _ in range(3)] == [True, True, False]
    assert repr(limit) == "<ConcurrencyLimit 2/2 in flight, 1 refused>"
    limit.release(0.1)
    assert limit.try_acquire()


def test_retry_after_is_about_the_mean_stay_within_bounds() -> None:
    limit = ConcurrencyLimit(1)
    assert limit.retry_after_s == 0.05
    for stayed_s, expected_s in ((2.0, 2.0), (900.0, 30.0)):
        for _ in range(200):
            assert limit.try_acquire()
            limit.release(stayed_s)
        assert limit.retry_after_s == pytest.approx(expected_s, rel=0.01)


def test_a_limit_of_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ConcurrencyLimit(0)


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=50))
def test_never_more_than_the_limit_are_inside(most: int, arrivals: list[bool]) -> None:
    limit, inside = ConcurrencyLimit(most), 0
    for arrives in arrivals:
        if arrives:
            inside += limit.try_acquire()
        elif inside:
            limit.release(0.1)
            inside -= 1
        assert limit.in_flight == inside <= most

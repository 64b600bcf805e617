"""Shares of gateways that know the same add up to the whole, and go to those of which something is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.peers.fair_share import FLOOR, HEADROOM, QuotaUse, fair_share

DEMANDS = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=16)


def shares(whole: float, demands: list[float], unknown: int = 0) -> list[float]:
    """Of gateways that grant all that is asked, as far as the whole allows."""
    usages = [QuotaUse(one, one) for one in demands]
    others = [usages[:place] + usages[place + 1 :] for place in range(len(usages))]
    return [fair_share(whole, own, rest, unknown) for own, rest in zip(usages, others, strict=True)]


def granted(whole: float, demands: list[float], unknown: int = 0) -> float:
    return sum(min(share, one) for share, one in zip(shares(whole, demands, unknown), demands, strict=True))


@given(whole=st.floats(1e-3, 1e6), demands=DEMANDS, unknown=st.integers(0, 4))
def test_no_more_than_the_whole_is_granted_and_no_share_is_nothing(
    whole: float, demands: list[float], unknown: int
) -> None:
    equal = whole / (len(demands) + unknown)
    assert granted(whole, demands, unknown) + unknown * equal <= whole * (1.0 + 1e-9)
    assert min(shares(whole, demands, unknown)) >= FLOOR * equal * (1.0 - 1e-9)


@given(whole=st.floats(1.0, 1e3), demands=DEMANDS)
def test_all_that_is_asked_is_granted_or_the_whole(whole: float, demands: list[float]) -> None:
    assert granted(whole, demands) == pytest.approx(min(whole, sum(demands)), rel=1e-6, abs=1e-6)


def test_alone_it_has_the_whole() -> None:
    assert fair_share(100.0, QuotaUse(0.0, 0.0), []) == pytest.approx(100.0)
    assert fair_share(100.0, QuotaUse(500.0, 100.0), []) == pytest.approx(100.0)


def test_the_least_asked_is_served_in_full_and_the_others_in_equal_parts() -> None:
    found = shares(100.0, [200.0, 200.0, 20.0, 0.0])
    assert found == pytest.approx([40.0, 40.0, 20.0 * (1.0 + HEADROOM), FLOOR * 25.0 * (1.0 + HEADROOM)])


def test_what_one_that_is_served_in_full_does_not_use_is_the_others() -> None:
    spared = fair_share(100.0, QuotaUse(200.0, 60.0), [QuotaUse(30.0, 10.0), QuotaUse(200.0, 30.0)])
    assert spared == pytest.approx(35.0 + 20.0 / 2)


def test_one_that_has_said_nothing_is_left_its_equal_part() -> None:
    assert fair_share(100.0, QuotaUse(500.0, 25.0), [QuotaUse(0.0, 0.0)], unknown=2) == pytest.approx(50.0, abs=1.0)
    assert fair_share(100.0, QuotaUse(500.0, 25.0), [], unknown=3) == pytest.approx(25.0)

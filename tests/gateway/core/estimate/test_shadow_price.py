"""Rent: nothing while there is room, dear where it is full, and gone soon after."""

from __future__ import annotations

from math import e

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.shadow_price import MEMORY_S, ShadowPrice, slot_price
from tests.support.gateway.fleets import NOW

MOST_RENT = 100.0


def steady(share: float) -> ShadowPrice:
    """A target that was sent so much of its time, a hundredth of a second at a time, up to `NOW`."""
    congestion = ShadowPrice()
    for tick in range(1000):
        congestion.sent(share * 0.010, NOW - (999 - tick) * 0.010)
    return congestion


def test_where_nothing_was_sent_a_second_is_free() -> None:
    assert ShadowPrice().per_second(NOW) == 0.0
    assert ShadowPrice().rate(NOW) == 0.0


@pytest.mark.parametrize(("share", "rent"), [(0.1, 1 / 9), (0.5, 1.0), (0.8, 4.0), (0.95, 9.5), (2.0, 20.0)])
def test_the_fuller_it_is_the_more_a_second_costs(share: float, rent: float) -> None:
    assert steady(share).rate(NOW) == pytest.approx(share, rel=0.02)
    assert steady(share).per_second(NOW) == pytest.approx(rent, rel=0.15)
    assert repr(steady(0.5)).startswith("<ShadowPrice 0.5")


def test_the_rate_falls_by_a_factor_of_e_in_its_memory() -> None:
    congestion = steady(0.5)
    assert congestion.rate(NOW + MEMORY_S) == pytest.approx(congestion.rate(NOW) / e)
    assert congestion.per_second(NOW + 20 * MEMORY_S) < 1e-6


@pytest.mark.parametrize(("taken", "slots", "price"), [
    (0.0, 4, 0.0), (1.0, 4, 1 / 512), (2.0, 4, 1 / 32), (4.0, 4, 0.5), (9.0, 4, 0.5), (3.0, 1, 0.0), (9.0, 0, 0.0),
])  # fmt: skip
def test_the_last_slots_of_an_engine_are_the_dear_ones(taken: float, slots: int, price: float) -> None:
    assert slot_price(taken, slots) == pytest.approx(price)


sendings = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1e6)), max_size=40)


@pytest.mark.slow
@given(sendings, st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_rents_have_bounds_fall_with_time_and_rise_with_work(
    sent: list[tuple[float, float]], later_s: float, work_s: float
) -> None:
    congestion, now = ShadowPrice(), NOW
    for pause_s, some_work_s in sent:
        now += pause_s
        before = congestion.per_second(now)
        congestion.sent(some_work_s, now)
        assert before <= congestion.per_second(now) <= MOST_RENT + 1e-9
    assert 0.0 <= congestion.per_second(now + later_s) <= congestion.per_second(now)
    after_it = congestion.per_second(now + later_s)
    congestion.sent(work_s, now + later_s)
    assert congestion.per_second(now + later_s) >= after_it

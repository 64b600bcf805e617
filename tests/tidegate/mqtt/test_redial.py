"""The wait for a broker depends on which side caused the failure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.mqtt.redial import AWAY_CAP_S, HELD_AFTER_S, RedialPolicy, SessionEnd


def redial(draw: float = 1.0, cap_s: float = 30.0) -> RedialPolicy:
    return RedialPolicy(lambda: draw, 0.5, cap_s)


def test_a_broker_that_is_away_is_asked_every_few_seconds_however_long_it_is_away() -> None:
    waits = redial()
    assert [waits.wait_s(SessionEnd.AWAY) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert max(waits.wait_s(SessionEnd.AWAY) for _ in range(1000)) == AWAY_CAP_S


@pytest.mark.parametrize("end", [SessionEnd.SHORT, SessionEnd.REFUSED])
def test_a_broker_that_is_there_and_does_not_want_us_is_asked_less_and_less(end: SessionEnd) -> None:
    waits = redial()
    assert [waits.wait_s(end) for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@given(st.lists(st.integers(0, 50), max_size=20), st.floats(0.0, 1.0, exclude_max=True))
def test_outages_one_after_another_never_add_up(outages: list[int], draw: float) -> None:
    waits = redial(draw)
    for attempts in outages:
        assert waits.wait_s(SessionEnd.SHORT) <= AWAY_CAP_S
        assert all(waits.wait_s(SessionEnd.AWAY) <= AWAY_CAP_S for _ in range(attempts + 1))


def test_a_session_that_stood_for_a_while_forgives_the_quarrels_before_it() -> None:
    waits = redial()
    for _ in range(9):
        waits.wait_s(SessionEnd.SHORT)
    assert waits.wait_s(SessionEnd.of_session(HELD_AFTER_S)) == 0.5
    assert waits.wait_s(SessionEnd.of_session(HELD_AFTER_S - 0.1)) == 1.0


def test_a_quarrel_forgives_how_long_the_broker_was_away() -> None:
    waits = redial()
    for _ in range(9):
        waits.wait_s(SessionEnd.AWAY)
    waits.wait_s(SessionEnd.SHORT)
    assert waits.wait_s(SessionEnd.AWAY) == 0.5


def test_a_lower_cap_holds_for_brokers_that_are_away_too() -> None:
    waits = redial(cap_s=1.0)
    assert max(waits.wait_s(SessionEnd.AWAY) for _ in range(9)) == 1.0


def test_it_says_how_often_it_was_in_vain() -> None:
    waits = redial()
    waits.wait_s(SessionEnd.AWAY)
    assert waits.failures == 1
    assert repr(waits) == "<RedialPolicy 1 times away, 0 times unwelcome>"

"""Modes are entered by evidence at once and left only when the evidence holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.connectivity import HOLD_S, PROBES, SILENT_S, Connectivity
from edge_agent.core.wall_clock import WallClock
from tidegate.fleet.conditions import Mode


def looked(one: Connectivity, seconds: int, *, begin: float, session: bool, links: int) -> float:
    for second in range(seconds + 1):
        one.look(session=session, links=links, now=begin + second)
    return begin + seconds


def online(at: float = 0.0) -> tuple[Connectivity, float]:
    one = Connectivity()
    return one, looked(one, 6, begin=at, session=True, links=1)


@pytest.mark.parametrize(
    ("session", "links", "mode"),
    [
        (True, 1, "online"),
        (False, 1, "control-lost"),
        (True, 0, "cloud-lost"),
        (False, 0, "isolated"),
    ],
)
def test_each_row_of_the_table_is_entered_by_its_evidence(session: bool, links: int, mode: Mode) -> None:
    one, now = online()

    one.look(session=session, links=links, now=now + SILENT_S + 1)

    assert one.mode == mode


def test_only_a_change_to_fewer_is_worse() -> None:
    one = Connectivity()
    changes = [one.look(session=True, links=0, now=float(second)) for second in range(7)]
    assert [change.is_worse for change in changes if change] == [False]  # from nobody to a broker without a gateway
    changes = [one.look(session=True, links=1, now=7.0 + second) for second in range(7)]
    assert [change.is_worse for change in changes if change] == [False]
    change = one.look(session=False, links=1, now=20.0)
    assert change is not None and change.is_worse


def test_a_device_begins_isolated_and_is_online_after_three_good_looks_and_five_seconds() -> None:
    one = Connectivity()
    modes = []
    for second in range(7):
        one.look(session=True, links=1, now=float(second))
        modes.append(one.mode)

    assert modes == ["isolated"] * 5 + ["online"] * 2


def test_many_looks_at_once_are_one_probe() -> None:
    one = Connectivity()
    for number in range(100):
        one.look(session=True, links=1, now=number * 0.001)
    change = one.look(session=True, links=1, now=HOLD_S + 1)  # the second probe

    assert change is None
    assert one.mode == "isolated"


def test_a_lost_session_is_believed_at_once_and_a_short_return_is_not() -> None:
    one, now = online()

    lost = one.look(session=False, links=1, now=now + 0.1)
    one.look(session=True, links=1, now=now + 0.2)
    one.look(session=True, links=1, now=now + 1.2)
    again = one.look(session=False, links=1, now=now + 2.2)

    assert lost is not None
    assert (lost.mode, lost.before) == ("control-lost", "online")
    assert "broker gone" in lost.why
    assert again is None  # one change, not three


def test_a_gateway_that_beats_without_a_link_is_there_until_it_is_silent() -> None:
    one = Connectivity()
    for second in range(7):
        one.heard(float(second))
        one.look(session=True, links=0, now=float(second))
    assert one.mode == "online"

    one.look(session=True, links=0, now=6.0 + SILENT_S)
    assert one.mode == "online"
    one.look(session=True, links=0, now=6.1 + SILENT_S)
    assert one.mode == "cloud-lost"


def test_a_gateway_that_says_goodbye_is_gone_at_once_and_another_is_not() -> None:
    one = Connectivity()
    for second in range(7):
        one.heard(float(second), "a")
        one.heard(float(second), "b")
        one.look(session=True, links=0, now=float(second))

    one.left("a")
    assert one.look(session=True, links=0, now=7.0) is None
    one.left("b")
    gone = one.look(session=True, links=0, now=8.0)
    assert gone is not None
    assert gone.mode == "cloud-lost"


def test_a_device_that_has_no_broker_misses_none() -> None:
    one = Connectivity(has_broker=False)
    now = looked(one, 6, begin=0.0, session=False, links=1)
    assert one.mode == "online"

    one.look(session=False, links=0, now=now + 1)
    assert one.mode == "cloud-lost"


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans(), st.integers(0, 2), st.booleans()), max_size=80))
def test_no_flapping_returns_to_a_better_mode_sooner_than_the_hold(
    looks: list[tuple[float, bool, int, bool]],
) -> None:
    """Whatever happens: a side is only said to be there after PROBES good looks in a row over HOLD_S."""
    one, now, good, since = Connectivity(), 0.0, 0, 0.0
    for gap, session, links, heard in looks:
        now += gap
        if heard:
            one.heard(now)
        one.look(session=session, links=links, now=now)
        good, since = (good + 1, since if good else now) if session else (0, now)
        if one.mode in ("online", "cloud-lost"):
            assert good >= PROBES
            assert now - since >= HOLD_S
        if not session:
            assert one.mode in ("control-lost", "isolated")


@pytest.mark.parametrize(
    ("theirs", "ours", "right"),
    [(1.8e9, 1.8e9 + 30, True), (1.8e9, 40.0, False), (0.0, 1.8e9, False), (1.8e9, 1.8e9 + 86_400, False)],
)
def test_the_wall_clock_is_believed_when_a_gateways_says_the_same(theirs: float, ours: float, right: bool) -> None:
    clock = WallClock()
    clock.heard(theirs, ours, 100.0)
    assert clock.is_right(ours, 100.0) is right


def test_the_wall_clock_is_not_believed_once_it_was_set_until_a_gateways_says_the_same_again() -> None:
    clock, day_s = WallClock(), 86_400.0
    clock.heard(1.8e9, 1.8e9, 100.0)
    assert clock.is_right(1.8e9 + day_s + 30.0, 100.0 + day_s)  # it drifts
    for step_s in (61.0, -61.0, 30 * day_s):
        assert not clock.is_right(1.8e9 + day_s + step_s, 100.0 + day_s)
    clock.heard(0.0, 1.8e9 + 31 * day_s, 100.0 + day_s)
    assert not clock.is_right(1.8e9 + 31 * day_s, 100.0 + day_s)
    clock.heard(1.8e9 + 31 * day_s, 1.8e9 + 31 * day_s, 100.0 + day_s)
    assert clock.is_right(1.8e9 + 32 * day_s, 100.0 + 2 * day_s)


def test_it_says_how_it_is() -> None:
    one, _ = online()
    assert repr(one) == "<Connectivity online since 5.0, 1 changes>"

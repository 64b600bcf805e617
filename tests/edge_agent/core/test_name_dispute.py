"""An agent whose name another one keeps stays away for longer each time, and asks again."""

from __future__ import annotations

import inspect

import pytest

from edge_agent.core.diagnosis import name_taken
from edge_agent.core.name_dispute import NameDispute
from edge_agent.fleet.sync import EdgeSync
from tidegate.fleet.name_conflict import FIRST_STAND_DOWN_S, MOST_STAND_DOWN_S


def test_each_refusal_doubles_the_wait_up_to_ten_minutes() -> None:
    dispute, now, waits = NameDispute(lambda: 0.0), 0.0, []
    for _ in range(7):
        waits.append(dispute.refused("taken", now))
        now = dispute.until
    assert waits == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0, 600.0]


def test_waits_are_jittered_by_a_quarter_at_most() -> None:
    assert NameDispute(lambda: 0.999).refused("taken", 0.0) == pytest.approx(0.75 * FIRST_STAND_DOWN_S, rel=0.01)


def test_several_gateways_that_refuse_one_attempt_count_once() -> None:
    dispute = NameDispute(lambda: 0.0)
    assert dispute.refused("taken", 0.0) == 60.0
    assert dispute.refused("taken", 1.0) == 59.0
    assert dispute.standing_down(59.9) and not dispute.standing_down(60.0)


def test_even_the_shortest_stay_is_longer_than_the_other_may_need_to_take_its_session_back() -> None:
    longest_wait_s = inspect.signature(EdgeSync.__init__).parameters["backoff_cap_s"].default
    assert NameDispute(lambda: 1.0).refused("taken", 0.0) > longest_wait_s + 10.0


def test_peace_forgives() -> None:
    dispute = NameDispute(lambda: 0.0)
    dispute.refused("taken", 0.0)
    dispute.refused("taken", 60.0)
    assert dispute.refused("taken", 181.0 + MOST_STAND_DOWN_S) == FIRST_STAND_DOWN_S


def test_people_read_why_for_as_long_as_it_lasts() -> None:
    dispute = NameDispute(lambda: 0.0)
    assert dispute.told(0.0) == "" and name_taken(dispute.told(0.0)) == []
    dispute.refused("taken by 10.0.0.1", 0.0)
    (finding,) = name_taken(dispute.told(10.0))
    assert (finding.verdict, finding.words) == ("failure", "taken by 10.0.0.1")
    assert dispute.told(200.0) == ""

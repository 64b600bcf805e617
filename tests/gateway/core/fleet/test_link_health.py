"""Which link is sick: one word and its reason, from what is known of the target and of its usual round trips."""

from __future__ import annotations

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkRtt
from gateway.core.fleet.link_health import LENGTH, RttTimeline, link_state
from tests.support.gateway.fleets import NOW, fleet_of, variant


def fleet_with(rtt_s: float) -> Fleet:
    fleet = fleet_of(edge_a=variant(), pool_main=variant())
    for second in range(20):
        fleet.fold(LinkRtt("edge/a", rtt_s), NOW + second)
    return fleet


def watched(fleet: Fleet, samples: int = 20) -> RttTimeline:
    timeline = RttTimeline()
    for _ in range(samples):
        timeline.sample(fleet.targets["edge/a"])
    return timeline


def test_a_link_as_it_usually_is_is_well() -> None:
    fleet = fleet_with(0.002)
    assert link_state(fleet.targets["edge/a"], watched(fleet), NOW + 20) == ("well", "")


def test_a_link_several_times_as_slow_as_it_was_is_named_within_seconds_and_says_both_figures() -> None:
    fleet = fleet_with(0.002)
    timeline = watched(fleet)
    for second in range(5):
        fleet.fold(LinkRtt("edge/a", 0.150), NOW + 20 + second)

    health, reason = link_state(fleet.targets["edge/a"], timeline, NOW + 25)

    assert health == "slow"
    assert reason.endswith("usually 2.0 ms")


def test_it_stays_slow_when_the_estimate_has_forgotten_the_old_link() -> None:
    fleet = fleet_with(0.002)
    timeline = watched(fleet, LENGTH)
    for second in range(60):
        fleet.fold(LinkRtt("edge/a", 0.150), NOW + 20 + second)
        if second % 2 == 0:
            timeline.sample(fleet.targets["edge/a"])
    assert fleet.targets["edge/a"].link.calm_s == 0.150
    assert link_state(fleet.targets["edge/a"], timeline, NOW + 80).health == "slow"


def test_a_fraction_of_a_millisecond_more_is_no_sickness() -> None:
    fleet = fleet_with(0.0002)
    timeline = watched(fleet)
    for second in range(5):
        fleet.fold(LinkRtt("edge/a", 0.002), NOW + 20 + second)
    assert link_state(fleet.targets["edge/a"], timeline, NOW + 25).health == "well"


def test_an_answer_that_is_due_and_does_not_come_makes_a_link_silent() -> None:
    fleet = fleet_with(0.002)
    target = fleet.targets["edge/a"]
    target.link.sent(1, NOW + 20)
    target.link.accepted(1, NOW + 20.002)
    target.link.sent(2, NOW + 20.1)
    health, reason = link_state(target, watched(fleet), NOW + 22.1)
    assert health == "silent"
    assert "nothing heard for 2.0 s" in reason


def test_a_link_that_is_down_says_why_and_leaves_gaps_in_its_timeline() -> None:
    fleet = fleet_with(0.002)
    timeline = watched(fleet, 3)
    fleet.fold(LinkDown("edge/a", "connection refused"), NOW + 20)
    timeline.sample(fleet.targets["edge/a"])

    assert link_state(fleet.targets["edge/a"], timeline, NOW + 20) == ("down", "connection refused")
    assert timeline.last(2)[1] is None
    assert timeline.last(2)[0] is not None


def test_what_the_device_itself_says_casts_doubt() -> None:
    fleet = fleet_with(0.002)
    fleet.heard("edge/a", load=None, doubt="stale: silent for 3.0 s", now=NOW + 20)
    assert link_state(fleet.targets["edge/a"], None, NOW + 20) == ("suspect", "stale: silent for 3.0 s")


def test_a_timeline_holds_five_minutes_and_no_more() -> None:
    fleet = fleet_with(0.002)
    assert len(watched(fleet, 3 * LENGTH).last(10_000)) == LENGTH

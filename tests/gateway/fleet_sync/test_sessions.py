"""The sessions of one device: wills and goodbyes in any order, older epochs dropped, what is missing asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.fleet_sync.registry import EpochHint, FleetRegister, NameTaken, Resync
from tests.support.mqtt.device_messages import Device, offer, register
from tests.support.mqtt.views import DEAD, FRESH, SUSPECT, alive, freshness, only
from tidegate.fleet.messages import MAX_EPOCH

# -- deaths ------------------------------------------------------------------------------------------------------------


def test_a_goodbye_is_dead_at_once() -> None:
    fleet, device = alive()
    fleet.fold(*device.goodbye("sleep"), 10.1)
    assert only(fleet, 10.1).freshness is DEAD
    assert only(fleet, 10.1).reason == "said goodbye: sleep"


def test_a_goodbye_cannot_be_taken_back_within_its_session() -> None:
    fleet, device = alive()
    fleet.fold(*device.goodbye(), 10.1)
    fleet.fold(*device.heartbeat(10.2), 10.2)
    assert freshness(fleet, 10.2) is DEAD
    device.epoch += 1
    fleet.fold(*device.birth(10.3), 10.3)
    assert freshness(fleet, 10.3) is FRESH


def test_a_will_of_this_session_is_suspect_then_dead_after_the_grace() -> None:
    fleet, device = alive(will_grace_s=2.0)
    fleet.fold(*device.will(), 10.1)
    assert freshness(fleet, 10.1) is SUSPECT
    assert fleet.next_wake(10.1) == pytest.approx(12.0, abs=0.01)  # silence comes first, then the grace at 12.1
    assert freshness(fleet, 12.0) is SUSPECT
    assert freshness(fleet, 12.1) is DEAD


def test_a_later_heartbeat_of_the_same_session_refutes_a_will() -> None:
    fleet, device = alive()
    fleet.fold(*device.will(), 10.1)
    fleet.fold(*device.heartbeat(11.0), 11.0)
    assert freshness(fleet, 11.0) is FRESH
    assert freshness(fleet, 12.5) is FRESH


def test_a_late_will_of_an_older_session_changes_nothing() -> None:
    fleet, device = alive()
    old_will = device.will()
    device.epoch += 1
    fleet.fold(*device.birth(12.0), 12.0)
    before = only(fleet, 12.1)
    fleet.fold(*old_will, 12.1)
    assert only(fleet, 12.1) == before


def test_a_death_whose_birth_was_never_seen_still_counts() -> None:
    fleet, device = alive()
    fleet.fold(*replace(device, epoch=101).will(), 10.1)
    assert freshness(fleet, 10.1) is SUSPECT
    fleet.fold(*device.heartbeat(10.5), 10.5)  # of the session before: refutes nothing
    assert freshness(fleet, 12.2) is DEAD


def test_a_goodbye_outranks_a_will_of_the_same_session_in_either_order() -> None:
    for order in (("will", "goodbye"), ("goodbye", "will")):
        fleet, device = alive()
        for what in order:
            topic, payload = getattr(device, what)()
            fleet.fold(topic, payload, 10.1)
        assert only(fleet, 10.1).reason == "said goodbye: shutdown"


def test_a_will_that_overtakes_its_birth_is_refuted_by_the_heartbeats_that_follow() -> None:
    fleet, device = register(), Device()
    first = device.heartbeat(10.0)
    fleet.fold(*first, 10.0)
    fleet.fold(*device.will(), 10.1)
    fleet.fold(*device.birth(10.0), 10.2)
    assert freshness(fleet, 10.2) is SUSPECT
    fleet.fold(*device.heartbeat(11.0), 11.0)
    assert freshness(fleet, 11.0) is FRESH


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_messages_of_an_older_session_are_dropped_and_counted() -> None:
    fleet, device = alive()
    zombie = replace(device, epoch=99)
    before = only(fleet, 10.5)
    fleet.fold(*zombie.heartbeat(10.5, queued=99), 10.5)
    fleet.fold(*zombie.birth(10.5, urls=("6.6.6.6:1",)), 10.5)
    assert only(fleet, 10.5) == before
    assert fleet.counts["stale_epoch"] == 2


def test_what_overtook_its_birth_waits_for_it_and_asks_for_it() -> None:
    fleet, device = alive()
    device.epoch = 101
    birth, beat = device.birth(11.0), device.heartbeat(11.1, queued=7)
    assert fleet.fold(*beat, 11.1) == [Resync("kiosk-1", 11.1 + 0.5 * 2.0, "its birth is missing")]
    assert only(fleet, 11.1).epoch == 100
    fleet.fold(*birth, 11.2)
    load = only(fleet, 11.2).load
    assert load is not None and (load.epoch, load.queued) == (101, 7)


def test_a_resync_that_was_answered_meanwhile_is_no_longer_wanted() -> None:
    fleet, device = register(), Device()
    (effect,) = fleet.fold(*device.heartbeat(10.0), 10.0)
    assert fleet.is_wanted(effect)
    fleet.fold(*device.birth(10.1), 10.1)
    assert not fleet.is_wanted(effect)


def test_what_waits_for_births_that_never_come_is_bounded() -> None:
    fleet, device = alive()
    for epoch in range(200, 400):
        device.epoch = epoch
        fleet.fold(*device.heartbeat(11.0), 11.0)
    assert len(fleet) == 1
    one = fleet.device(device.name)
    assert "ahead 32" in repr(one)
    device.epoch = 399
    fleet.fold(*device.birth(11.0), 11.0)
    assert "ahead 0" in repr(one)


def test_a_wiped_device_that_comes_back_with_a_lower_epoch_is_told_a_higher_one() -> None:
    fleet, device = alive()
    wiped = replace(device, epoch=1, boot="boot-b")
    (hint,) = fleet.fold(*wiped.birth(20.0), 20.0)
    assert hint == EpochHint("kiosk-1", 20.0, seen=1, boot="boot-b", minimum=101)
    assert fleet.is_wanted(hint)
    assert fleet.fold(*wiped.heartbeat(20.1), 20.1) == []  # told a moment ago
    assert fleet.fold(*wiped.heartbeat(21.1), 21.1) == [EpochHint("kiosk-1", 21.1, seen=1, boot="", minimum=101)]


def test_a_device_below_its_own_death_is_told_a_higher_epoch_too() -> None:
    fleet, device = register(), Device(epoch=5)
    fleet.fold(*replace(device, epoch=MAX_EPOCH).will(), 9.0)
    (hint,) = fleet.fold(*device.birth(10.0), 10.0)
    assert isinstance(hint, EpochHint) and hint.minimum == MAX_EPOCH


def test_two_agents_that_claim_one_epoch_are_parted() -> None:
    fleet, device = alive()
    twin = replace(device, boot="boot-z", _sequences={})
    (hint,) = fleet.fold(*twin.birth(11.0), 11.0)
    assert hint == EpochHint("kiosk-1", 11.0, seen=100, boot="boot-z", minimum=101)


# -- anti-entropy ------------------------------------------------------------------------------------------------------


def test_a_missed_inventory_is_asked_for_after_more_than_two_heartbeats_once() -> None:
    fleet, device = alive()
    missed = device.inventory(11.0, offer("minilm"))
    asked = [fleet.fold(*device.heartbeat(now), now) for now in (12.0, 13.0, 14.0, 15.0, 16.0)]
    assert asked == [[], [], [Resync("kiosk-1", 15.0, "its inventory is missing")], [], []]
    assert len(fleet.fold(*device.heartbeat(19.5), 19.5)) == 1  # nobody answered for five seconds: again
    fleet.fold(*missed, 20.0)
    assert fleet.fold(*device.heartbeat(30.0), 30.0) == []


def test_an_inventory_that_does_not_match_leaves_the_gap_open() -> None:
    fleet, device = alive()
    first, _ = device.inventory(11.0, offer("a")), device.inventory(11.5, offer("b"))
    for now in (12.0, 13.0, 14.0):
        effects = fleet.fold(*device.heartbeat(now), now)
    fleet.fold(*first, 14.5)
    assert fleet.is_wanted(effects[0])


@pytest.mark.slow
def test_a_thousand_gaps_cost_a_trickle() -> None:
    fleet = register(effects_per_s=5.0)
    devices = [Device(name=f"d{index}") for index in range(1000)]
    asked = [effect for device in devices for effect in fleet.fold(*device.heartbeat(10.0), 10.0)]
    assert len(asked) == 10
    asked = [effect for device in devices for effect in fleet.fold(*device.heartbeat(12.0), 12.0)]
    assert len(asked) == 20  # the hundredth part, for two seconds


@pytest.mark.slow
def test_a_large_fleet_is_asked_faster_than_a_small_one() -> None:
    """Ten thousand gaps, closed at the rate for a hundred devices, would take half an hour."""
    fleet = register(effects_per_s=5.0)
    devices = [Device(name=f"d{index}", interval_ms=10_000) for index in range(2000)]
    seconds, now = 0, 10.0
    while fleet.unborn or not seconds:
        seconds, now = seconds + 1, now + 1.0
        for device in devices[seconds % 10 :: 10]:
            for effect in fleet.fold(*device.heartbeat(now), now):
                fleet.fold(*device.birth(now), now)
                assert isinstance(effect, Resync)
    assert seconds <= 120


# -- two agents --------------------------------------------------------------------------------------------------------


def two_agents() -> tuple[FleetRegister, Device, Device]:
    """Two that have proved to live: the older one has returned, with epoch 102."""
    older, newer = Device(boot="older", epoch=100), Device(boot="newer", epoch=101, clock_offset_s=0.0)
    fleet = register()
    fleet.fold(*older.birth(10.0), 10.0)
    fleet.fold(*newer.birth(11.0), 11.0)
    older.epoch = 102
    fleet.fold(*older.birth(12.0), 12.0)
    return fleet, older, newer


def test_a_refused_agent_is_told_with_every_live_message_until_it_has_heard() -> None:
    fleet, _, newer = two_agents()
    newer.epoch = 103
    (told,) = fleet.fold(*newer.birth(13.0), 13.0)
    assert isinstance(told, NameTaken) and (told.seen, told.boot) == (103, "newer")

    assert fleet.fold(*newer.heartbeat(13.5), 13.5) == [], "not more than one a second"
    again = fleet.fold(*newer.heartbeat(14.1), 14.1)
    assert [(one.seen, one.boot) for one in again if isinstance(one, NameTaken)] == [(103, "newer")]
    assert fleet.fold(*newer.heartbeat(20.0), 20.0, retained=True) == [], "what was kept says nothing about now"
    assert fleet.fold(*newer.will(), 20.0) == [], "it is gone"
    assert only(fleet, 14.1).epoch == 102, "nothing of it is folded"


def test_whoever_speaks_in_the_epoch_of_a_refused_agent_is_asked_for_its_birth() -> None:
    fleet, older, newer = two_agents()
    newer.epoch = older.epoch = 103
    fleet.fold(*newer.birth(13.0), 13.0)
    asked = fleet.fold(*older.heartbeat(14.1), 14.1)  # its birth was lost
    assert [type(one) for one in asked] == [NameTaken, Resync] and fleet.is_wanted(asked[1])

    assert not any(isinstance(one, NameTaken) for one in fleet.fold(*older.birth(15.5), 15.5))
    fleet.fold(*older.heartbeat(16.0), 16.0)
    assert (only(fleet, 16.0).epoch, freshness(fleet, 16.0)) == (103, FRESH)


def test_every_message_in_an_epoch_that_two_agents_have_claimed_earns_a_hint() -> None:
    fleet, older = alive()
    newer = Device(boot="boot-b", epoch=older.epoch)
    (hint,) = fleet.fold(*newer.birth(11.0), 11.0)
    assert isinstance(hint, EpochHint) and hint.boot == "boot-b"

    (again,) = fleet.fold(*newer.heartbeat(12.5), 12.5)
    assert isinstance(again, EpochHint) and (again.seen, again.boot) == (older.epoch, ""), "it was lost; who speaks?"
    newer.epoch = again.minimum
    fleet.fold(*newer.birth(13.0), 13.0)
    assert fleet.fold(*newer.heartbeat(14.5), 14.5) == []


def test_an_agent_that_starts_behind_the_other_is_noticed_though_its_epoch_is_past() -> None:
    older, newer = Device(boot="older", epoch=100), Device(boot="newer", epoch=1, clock_offset_s=0.0)
    fleet = register()
    fleet.fold(*older.birth(10.0), 10.0)
    fleet.fold(*newer.birth(11.0), 11.0)
    assert fleet.claims.standing(11.0) == []
    fleet.fold(*older.birth(12.0), 12.0)
    assert [one.refused.boot for one in fleet.claims.standing(12.0)] == ["newer"]
    newer.epoch = 2
    (told,) = fleet.fold(*newer.birth(13.0), 13.0)
    assert isinstance(told, NameTaken)


def test_a_late_birth_of_a_start_that_is_over_is_no_second_agent() -> None:
    before, after = Device(boot="before", epoch=100), Device(boot="after", epoch=101)
    fleet = register()
    fleet.fold(*before.birth(10.0), 10.0)
    fleet.fold(*after.birth(11.0), 11.0)
    fleet.fold(*before.birth(12.0), 12.0)
    fleet.fold(*after.birth(13.0), 13.0)
    assert fleet.claims.standing(13.0) == []

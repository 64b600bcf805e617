"""The fold of everything that devices say: converges in any order, grades silence, believes no ghost."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fleet import TOPICS, Device, Spoken, offer, register
from tidegate.fleet.conditions import UNTOLD, Conditions
from tidegate.fleet.freshness import DeviceView, Freshness
from tidegate.fleet.merge import EpochHint, FleetRegister, Resync
from tidegate.fleet.messages import MAX_EPOCH
from tidegate.fleet.reported import ModelReport, RolloutState
from tidegate.fleet.topics import Up
from tidegate.types import LoadReport

FRESH, STALE, SUSPECT, DEAD = Freshness.FRESH, Freshness.STALE, Freshness.SUSPECT, Freshness.DEAD
CONTROL_LOST = Freshness.CONTROL_LOST


def only(fleet: FleetRegister, now: float) -> DeviceView:
    (view,) = fleet.devices(now)
    return view


def freshness(fleet: FleetRegister, now: float) -> Freshness:
    return only(fleet, now).freshness


def alive(now: float = 10.0, **settings: Any) -> tuple[FleetRegister, Device]:
    """A register that knows one device, just born and heard."""
    fleet, device = register(**settings), Device()
    fleet.fold(*device.birth(now), now)
    fleet.fold(*device.heartbeat(now), now)
    return fleet, device


# -- what is seen ------------------------------------------------------------------------------------------------------


def test_a_born_and_beating_device_is_seen_with_all_it_said() -> None:
    fleet, device = register(), Device(urls=("10.0.0.7:9001", "kiosk.local:9001"))
    fleet.fold(*device.birth(10.0, agent="0.1.0"), 10.0)
    fleet.fold(*device.heartbeat(11.0, queued=3, in_flight=1, queue_delay_ms=12.5), 11.0)
    assert only(fleet, 11.25) == DeviceView(
        name="kiosk-1",
        epoch=100,
        urls=("10.0.0.7:9001", "kiosk.local:9001"),
        offers=(offer(),),
        load=LoadReport(epoch=100, sequence=1, queued=3, in_flight=1, queue_delay_s=0.0125),
        freshness=FRESH,
        age_s=0.25,
        reason="",
        accepting=True,
        agent="0.1.0",
    )


def test_a_device_that_closed_its_admission_is_seen_not_accepting() -> None:
    fleet, device = alive()
    fleet.fold(*device.heartbeat(10.5, admission="closed"), 10.5)
    assert not only(fleet, 10.5).accepting
    fleet.fold(*device.heartbeat(10.7), 10.7)
    assert only(fleet, 10.7).accepting


def test_the_newest_word_on_a_devices_conditions_counts_in_whatever_order_it_comes() -> None:
    fleet, device = alive()
    assert only(fleet, 10.0).conditions == UNTOLD
    older = device.heartbeat(10.5, conditions=Conditions(battery=0.5))
    newer = device.heartbeat(10.6, conditions=Conditions(battery=0.4, metered=True))
    fleet.fold(*newer, 10.7)
    fleet.fold(*older, 10.8)
    assert only(fleet, 10.8).conditions == Conditions(battery=0.4, metered=True)


def test_without_a_birth_nothing_is_seen() -> None:
    fleet, device = register(), Device()
    fleet.fold(*device.heartbeat(10.0), 10.0)
    fleet.fold(*device.will(), 10.0)
    assert fleet.devices(10.0) == ()
    assert len(fleet) == 1


def test_an_inventory_replaces_what_the_birth_offered() -> None:
    fleet, device = alive()
    fleet.fold(*device.inventory(11.0, offer("digits", "2"), offer("minilm")), 11.0)
    assert [one.name for one in only(fleet, 11.0).offers] == ["digits", "minilm"]


def test_a_second_birth_of_a_session_tells_new_addresses_and_the_newer_revision_of_offers_counts() -> None:
    fleet, device = alive()
    fleet.fold(*device.inventory(11.0, offer("minilm")), 11.0)
    device.urls, device.offers, device.revision = ("10.0.0.8:9001",), (offer("new"),), 3
    fleet.fold(*device.birth(12.0), 12.0)
    assert only(fleet, 12.0).urls == ("10.0.0.8:9001",)
    assert only(fleet, 12.0).offers == (offer("new"),)


def test_an_older_birth_of_the_same_session_changes_nothing() -> None:
    fleet, device = register(), Device()
    first = device.birth(10.0)
    device.urls = ("10.0.0.8:9001",)
    fleet.fold(*device.birth(11.0), 11.0)
    fleet.fold(*first, 11.5)
    assert only(fleet, 11.5).urls == ("10.0.0.8:9001",)


# -- silence -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("silent_s", "expected"),
    [(0.0, FRESH), (2.0, FRESH), (2.01, STALE), (5.0, STALE), (5.01, SUSPECT), (10.0, SUSPECT), (10.01, DEAD)],
)
def test_silence_is_graded_in_heartbeat_intervals(silent_s: float, expected: Freshness) -> None:
    fleet, _ = alive(10.0)
    assert freshness(fleet, 10.0 + silent_s) is expected


def test_a_slower_cadence_earns_more_patience() -> None:
    fleet, device = register(), Device(interval_ms=5000)
    fleet.fold(*device.birth(0.0), 0.0)
    assert freshness(fleet, 9.0) is FRESH
    assert freshness(fleet, 51.0) is DEAD


def test_a_late_heartbeat_is_as_old_as_it_says_not_as_fresh_as_it_came() -> None:
    fleet, device = alive(10.0)
    held_back = device.heartbeat(11.0)
    fleet.fold(*held_back, 17.0)
    assert freshness(fleet, 17.0) is SUSPECT
    assert only(fleet, 17.0).age_s == pytest.approx(6.0)


def test_the_next_wake_is_when_silence_changes_a_class() -> None:
    fleet, _ = alive(10.0)
    now, seen = 10.0, []
    while (wake := fleet.next_wake(now)) is not None:
        assert wake > now
        now = wake
        seen.append((round(now, 2), freshness(fleet, now)))
    assert seen == [(12.0, STALE), (15.0, SUSPECT), (20.0, DEAD)]


def test_an_empty_fleet_never_wakes() -> None:
    assert register().next_wake(0.0) is None


# -- retained ----------------------------------------------------------------------------------------------------------


def test_a_retained_birth_alone_is_never_fresh_and_soon_dead() -> None:
    fleet, device = register(), Device()
    fleet.fold(*device.birth(10.0), 5000.0, retained=True)
    assert freshness(fleet, 5000.0) is SUSPECT
    assert only(fleet, 5000.0).reason == "known by retained messages only"
    assert freshness(fleet, 5010.1) is DEAD


def test_a_retained_birth_comes_to_life_with_one_live_heartbeat() -> None:
    fleet, device = register(), Device()
    fleet.fold(*device.birth(10.0), 5000.0, retained=True)
    fleet.fold(*device.heartbeat(5000.4), 5000.5)
    assert freshness(fleet, 5000.6) is FRESH


def test_a_replayed_heartbeat_of_a_silent_device_does_not_make_it_look_fresh() -> None:
    fleet, device = alive(10.0)
    old, newest = device.heartbeat(10.5), device.heartbeat(11.0)
    fleet.fold(*old, 10.5)
    fleet.fold(*newest, 11.0)
    for now in (40.0, 80.0, 120.0, 160.0):  # long enough for every honest sample to leave the window
        fleet.fold(*old, now)
        fleet.fold(*newest, now)
        assert freshness(fleet, now) is DEAD


def test_retained_messages_ask_nobody_anything() -> None:
    fleet, device = register(), Device()
    birth, inventory = device.birth(1.0), device.inventory(1.0, offer("minilm"))
    assert fleet.fold(*inventory, 100.0, retained=True) == []
    assert fleet.fold(*birth, 100.0, retained=True) == []


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
    (one,) = fleet._devices.values()
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


def test_a_thousand_gaps_cost_a_trickle() -> None:
    fleet = register(effects_per_s=5.0)
    devices = [Device(name=f"d{index}") for index in range(1000)]
    asked = [effect for device in devices for effect in fleet.fold(*device.heartbeat(10.0), 10.0)]
    assert len(asked) == 10
    asked = [effect for device in devices for effect in fleet.fold(*device.heartbeat(12.0), 12.0)]
    assert len(asked) == 10


# -- hostile -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "payload", "counted"),
    [
        ("tidegate/v1/other/up/kiosk-1/birth", b"{}", "foreign_topic"),
        (f"{TOPICS.root}/up/kiosk-1/birth", b"not json", "bad_payload"),
        (f"{TOPICS.root}/up/somebody-else/hb", Device().heartbeat(1.0)[1], "wrong_device"),
    ],
)
def test_what_cannot_be_believed_is_dropped_and_counted(topic: str, payload: bytes, counted: str) -> None:
    fleet = register()
    assert fleet.fold(topic, payload, 10.0) == []
    assert fleet.counts == {counted: 1}
    assert len(fleet) == 0


def test_a_birth_that_claims_a_foreign_address_is_refused() -> None:
    fleet = register(allow_url=lambda url: url.startswith("10."))
    fleet.fold(*Device(urls=("10.0.0.7:1", "6.6.6.6:1")).birth(1.0), 1.0)
    assert fleet.devices(1.0) == ()
    assert fleet.counts["foreign_url"] == 1


def test_a_full_register_takes_a_new_name_only_in_a_dead_ones_place() -> None:
    fleet = register(max_devices=2)
    for name in ("a", "b"):
        fleet.fold(*Device(name=name).birth(10.0), 10.0)
    newcomer = Device(name="c")
    fleet.fold(*newcomer.birth(11.0), 11.0)
    assert [view.name for view in fleet.devices(11.0)] == ["a", "b"]
    assert fleet.counts["no_room"] == 1
    fleet.fold(*Device(name="b", epoch=101).birth(20.5), 20.5)
    fleet.fold(*newcomer.birth(20.6), 20.6)
    assert [view.name for view in fleet.devices(20.6)] == ["b", "c"]


def test_an_empty_retained_birth_deletes_a_device_and_a_live_one_is_asked_back() -> None:
    fleet, device = alive()
    fleet.fold(TOPICS.up("kiosk-1", Up.BIRTH), b"", 11.0)
    fleet.fold(TOPICS.up("kiosk-1", Up.INVENTORY), b"", 11.0)
    assert fleet.devices(11.0) == () and fleet.counts["forgotten"] == 1
    assert not fleet.is_wanted(Resync("kiosk-1", 11.0, ""))
    assert len(fleet.fold(*device.heartbeat(12.0), 12.0)) == 1


def test_the_cost_of_a_fold_does_not_depend_on_the_size_of_the_fleet() -> None:
    def python_calls_of_one_fold(devices: int) -> int:
        fleet = register()
        for index in range(devices):
            fleet.fold(*Device(name=f"d{index}").birth(10.0), 10.0)
        topic, payload = Device(name="d0").heartbeat(10.5)
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        fleet.fold(topic, payload, 10.5)
        sys.setprofile(None)
        return calls

    assert python_calls_of_one_fold(2) == python_calls_of_one_fold(500)


# -- data plane --------------------------------------------------------------------------------------------------------

LOAD = LoadReport(epoch=100, sequence=7, queued=2, in_flight=1, queue_delay_s=0.5)


def test_a_device_that_answers_stays_usable_when_the_broker_thinks_it_dead() -> None:
    fleet, device = alive()
    fleet.fold(*device.will(), 10.1)
    assert fleet.data_plane("kiosk-1", 100, 7, LOAD, 13.0)
    assert only(fleet, 13.0).freshness is CONTROL_LOST
    assert only(fleet, 13.0).reason == "answers requests, though its last will came"
    assert only(fleet, 13.0).load == LOAD
    assert CONTROL_LOST.is_usable and not SUSPECT.is_usable
    assert freshness(fleet, 18.1) is DEAD  # the last answer is five intervals old
    assert fleet.next_wake(14.9) == pytest.approx(15.0, abs=0.01)


def test_answers_of_a_newer_session_than_the_goodbye_are_believed() -> None:
    fleet, device = alive()
    fleet.fold(*device.goodbye(), 10.1)
    fleet.data_plane("kiosk-1", 100, 8, LOAD, 10.2)
    assert freshness(fleet, 10.2) is DEAD
    fleet.data_plane("kiosk-1", 101, 1, None, 20.3)
    assert freshness(fleet, 20.4) is CONTROL_LOST


def test_old_answers_tell_nothing() -> None:
    fleet, _ = alive()
    assert fleet.data_plane("kiosk-1", 100, 7, LOAD, 11.0)
    assert not fleet.data_plane("kiosk-1", 100, 7, LOAD, 12.0)
    assert not fleet.data_plane("kiosk-1", 99, 900, LOAD, 12.0)
    assert not fleet.data_plane("nobody", 1, 1, LOAD, 12.0)


def test_the_load_that_came_last_counts_by_whichever_road() -> None:
    fleet, device = alive()
    fleet.data_plane("kiosk-1", 100, 7, LOAD, 11.0)
    assert only(fleet, 11.0).load == LOAD
    fleet.fold(*device.heartbeat(11.5, queued=9), 11.5)
    load = only(fleet, 11.5).load
    assert load is not None and load.queued == 9


def test_before_any_heartbeat_there_is_no_load() -> None:
    fleet, device = register(), Device()
    fleet.fold(*device.birth(10.0), 10.0)
    assert only(fleet, 10.0).load is None


def test_a_pong_prolongs_what_an_answer_said() -> None:
    fleet, _ = alive()
    assert not fleet.data_plane_alive("kiosk-1", 11.0)
    fleet.data_plane("kiosk-1", 100, 7, LOAD, 11.0)
    assert fleet.data_plane_alive("kiosk-1", 25.0)
    assert freshness(fleet, 25.0) is CONTROL_LOST
    assert only(fleet, 26.0).age_s == pytest.approx(1.0)
    assert not fleet.data_plane_alive("nobody", 25.0)


def test_a_broken_data_link_is_suspect_until_the_device_speaks_again_by_any_road() -> None:
    fleet, device = alive()
    fleet.data_plane("kiosk-1", 100, 7, LOAD, 10.5)
    assert fleet.data_plane_lost("kiosk-1", 10.6)
    assert only(fleet, 10.6).freshness is SUSPECT
    assert only(fleet, 10.6).reason == "its data link broke"
    fleet.fold(*device.heartbeat(11.0), 11.0)
    assert freshness(fleet, 11.0) is FRESH
    fleet.data_plane_lost("kiosk-1", 11.1)
    fleet.data_plane("kiosk-1", 100, 8, LOAD, 11.2)
    assert freshness(fleet, 11.2) is FRESH
    assert not fleet.data_plane_lost("nobody", 11.0)


def test_a_link_that_breaks_before_any_answer_is_suspect_too() -> None:
    fleet, device = register(), Device()
    fleet.fold(*device.birth(10.0), 10.0)
    fleet.data_plane_lost("kiosk-1", 10.1)
    assert freshness(fleet, 10.1) is SUSPECT


# -- our own outage ----------------------------------------------------------------------------------------------------


def test_silence_while_we_have_no_broker_is_nobodys_fault() -> None:
    fleet, device = alive(10.0)
    fleet.control_plane(up=False, now=10.5)
    assert freshness(fleet, 10.6) is CONTROL_LOST
    assert only(fleet, 600.0).reason == "not heard since this gateway lost the broker"
    fleet.control_plane(up=True, now=600.0)
    assert freshness(fleet, 629.0) is CONTROL_LOST  # devices back off for up to 30 s, too
    fleet.fold(*device.heartbeat(629.5), 629.5)
    assert freshness(fleet, 629.5) is FRESH


def test_a_device_that_was_back_at_the_broker_before_us_was_never_gone() -> None:
    fleet, device = alive(10.0)
    fleet.fold(*device.heartbeat(44.0), 44.0)
    fleet.control_plane(up=False, now=44.5)
    fleet.control_plane(up=True, now=47.0)
    device.epoch += 1
    fleet.fold(*device.birth(46.0), 47.1, retained=True)
    assert freshness(fleet, 47.1) is CONTROL_LOST, "heard live until the outage, which excuses the silence since"
    fleet.fold(*device.heartbeat(47.5), 47.5)
    assert freshness(fleet, 47.5) is FRESH


def test_a_device_that_died_during_our_outage_is_dead_in_the_end() -> None:
    fleet, _ = alive(10.0)
    fleet.control_plane(up=False, now=10.5)
    assert fleet.next_wake(11.0) is None
    fleet.control_plane(up=True, now=70.0)
    now = 70.0
    while (wake := fleet.next_wake(now)) is not None:
        now = wake
    assert freshness(fleet, now) is DEAD
    assert now == pytest.approx(70.0 + 30.0 + 10.0 - 0.5, abs=0.1)


def test_a_flapping_broker_is_one_long_outage() -> None:
    fleet, _ = alive(10.0)
    fleet.control_plane(up=True, now=10.2)  # no change
    fleet.control_plane(up=False, now=10.5)
    for down in range(20, 200, 20):
        fleet.control_plane(up=True, now=down - 1.0)
        fleet.control_plane(up=False, now=float(down))
        fleet.control_plane(up=False, now=down + 0.5)  # no change
    assert freshness(fleet, 200.0) is CONTROL_LOST


def test_an_outage_long_past_excuses_nothing() -> None:
    fleet, device = alive(10.0)
    fleet.control_plane(up=False, now=10.5)
    fleet.control_plane(up=True, now=11.0)
    fleet.fold(*device.heartbeat(50.0), 50.0)
    fleet.control_plane(up=False, now=60.5)
    fleet.control_plane(up=True, now=61.0)
    assert freshness(fleet, 61.0) is DEAD  # ten intervals had passed before the second one began


def test_repr_says_what_is_in_it() -> None:
    fleet, _ = alive()
    assert repr(fleet) == "<FleetRegister f1 1 devices, 2 folded>"
    assert repr(next(iter(fleet._devices.values()))) == "<Device kiosk-1 born 100 died 0 heartbeat 1 ahead 0>"


# -- any order ---------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[float, Spoken]], Device, float]:
    """What one device said over some sessions, and its state at the end."""
    device, now, said = Device(), 10.0, []
    for session in range(draw(st.integers(1, 4))):
        device.epoch += draw(st.integers(1, 3)) if session else 0
        said.append((now, device.birth(now)))
        for what in draw(st.lists(st.sampled_from(["beat", "beat", "inventory", "move", "report"]), max_size=6)):
            now += 1.0
            if what == "beat":
                said.append((now, device.heartbeat(now, queued=draw(st.integers(0, 9)))))
            elif what == "inventory":
                said.append((now, device.inventory(now, offer(version=str(draw(st.integers(1, 3)))))))
            elif what == "report":
                report = ModelReport("digits", draw(st.sampled_from(RolloutState)), done_bytes=draw(st.integers(0, 9)))
                said.append((now, device.reported(now, report)))
            else:
                device.urls = (f"10.0.0.{draw(st.integers(1, 9))}:1",)
                said.append((now, device.birth(now)))
        if draw(st.booleans()):
            said.append((now, device.will()))
    device.epoch += 1  # whatever was before, the device is here now
    said += [(now, device.birth(now)), (now, device.heartbeat(now, queued=draw(st.integers(0, 9))))]
    return said, device, now


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_order_duplication_and_loss_of_superseded_messages_ends_in_the_same_view(data: st.DataObject) -> None:
    said, device, now = data.draw(histories())
    in_order = register()
    for _, message in said:
        in_order.fold(*message, now)

    # Only the last of each topic must arrive (what a broker retains, and the newest heartbeat); all else may be lost.
    last = {topic: index for index, (_, (topic, _)) in enumerate(said)}.values()
    kept = [message for index, (_, message) in enumerate(said) if index in last or data.draw(st.booleans())]
    again = data.draw(st.lists(st.sampled_from(kept), max_size=8))
    shuffled = register()
    for message in data.draw(st.permutations(kept + again)):
        shuffled.fold(*message, now)

    assert only(shuffled, now) == only(in_order, now)
    assert only(shuffled, now).freshness is FRESH
    assert only(shuffled, now).offers == device.offers and only(shuffled, now).urls == device.urls


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_the_order_a_device_that_stays_silent_is_dead(data: st.DataObject) -> None:
    said, device, now = data.draw(histories())
    fleet = register()
    for _, message in data.draw(st.permutations([*said, (now, device.will())])):
        fleet.fold(*message, now)
    assert freshness(fleet, now + 10.5) is DEAD


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_ghost_that_a_broker_keeps_never_looks_usable(data: st.DataObject) -> None:
    said, _, now = data.draw(histories())
    retained = {topic: payload for _, (topic, payload) in said if not topic.endswith("/hb")}
    fleet = register()
    later = now + data.draw(st.floats(0.0, 1e6))
    for topic, payload in data.draw(st.permutations(list(retained.items()))):
        fleet.fold(topic, payload, later, retained=True)
    for wait_s in (0.0, 1.0, 9.0, 11.0):
        assert not freshness(fleet, later + wait_s).is_usable

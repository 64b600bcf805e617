"""The fold of everything that devices report: what is seen, how silence is graded, and that any order ends alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet_sync.freshness import DeviceView, Freshness
from tests.support.mqtt.device_messages import TOPICS, Device, Spoken, offer, register, spoken
from tests.support.mqtt.views import DEAD, FRESH, STALE, SUSPECT, alive, freshness, only
from tidegate.fleet.conditions import UNTOLD, DeviceConditions
from tidegate.fleet.reported import ConfigurationReport, ModelReport, Reported, RolloutState
from tidegate.fleet.topics import DeviceTopic
from tidegate.types import LoadReport

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
    older = device.heartbeat(10.5, conditions=DeviceConditions(battery=0.5))
    newer = device.heartbeat(10.6, conditions=DeviceConditions(battery=0.4, metered=True))
    fleet.fold(*newer, 10.7)
    fleet.fold(*older, 10.8)
    assert only(fleet, 10.8).conditions == DeviceConditions(battery=0.4, metered=True)


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


def test_retained_messages_cause_no_question_to_a_device() -> None:
    fleet, device = register(), Device()
    birth, inventory = device.birth(1.0), device.inventory(1.0, offer("minilm"))
    assert fleet.fold(*inventory, 100.0, retained=True) == []
    assert fleet.fold(*birth, 100.0, retained=True) == []


# -- our own outage ----------------------------------------------------------------------------------------------------


def test_repr_says_what_is_in_it() -> None:
    fleet, _ = alive()
    assert repr(fleet) == "<FleetRegister f1 1 devices, 2 folded>"
    assert repr(fleet.device("kiosk-1")) == "<DeviceRegister kiosk-1 born 100 died 0 heartbeat 1 ahead 0>"


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


@pytest.mark.slow
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


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_the_order_a_device_that_stays_silent_is_dead(data: st.DataObject) -> None:
    said, device, now = data.draw(histories())
    fleet = register()
    for _, message in data.draw(st.permutations([*said, (now, device.will())])):
        fleet.fold(*message, now)
    assert freshness(fleet, now + 10.5) is DEAD


@pytest.mark.slow
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


def test_a_device_that_refuses_its_own_file_is_remembered_until_it_takes_it() -> None:
    registry, device = register(), Device()
    registry.fold(*device.birth(0.0), 0.0)

    def says(sequence: int, file: str, now: float) -> None:
        report = ConfigurationReport(RolloutState.COMMITTED, "d", file=file)
        registry.fold(*spoken(Reported(device.name, device.epoch, sequence, 0, configuration=report)), now)

    says(1, "key 'mqtt'", 1.0)
    says(2, "key 'host'", 2.0)
    assert registry.refused_files == {device.name: (1.0, "key 'host'")}
    says(3, "", 3.0)
    assert registry.refused_files == {}
    says(4, "key 'mqtt'", 4.0)
    registry.fold(TOPICS.up(device.name, DeviceTopic.BIRTH), b"", 5.0)
    assert registry.refused_files == {}, "with the device itself"

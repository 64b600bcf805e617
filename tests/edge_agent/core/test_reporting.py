"""Reporting decides what an agent publishes about itself, and when."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.reporting import PROGRESS_GAP_S, AgentState, Publication, Reporting, RolloutReport
from gateway.fleet_sync.freshness import Freshness
from tests.support.mqtt.device_messages import TOPICS, offer, register
from tidegate.fleet.conditions import DeviceConditions
from tidegate.fleet.messages import Birth, Death, Heartbeat, Inventory, decode_up, inventory_hash
from tidegate.fleet.reported import ConfigurationReport, ModelReport, Reported, RolloutState
from tidegate.fleet.topics import DeviceTopic
from tidegate.types import LoadReport

UTC = 1.8e9


def state(queued: int = 0, **changes: Any) -> AgentState:
    fields: dict[str, Any] = {
        "offers": (offer(),),
        "urls": ("10.0.0.7:9001",),
        "load": LoadReport(epoch=1, sequence=1, queued=queued, in_flight=1, queue_delay_s=0.25),
    }
    return AgentState(**(fields | changes))


def reporting(draw: float = 0.5) -> Reporting:
    return Reporting("kiosk-1", boot="b1", started_at=90.0, draw=lambda: draw, agent_version="0.1.0")


def kinds(publications: list[Publication]) -> list[str]:
    return [one.kind.value for one in publications]


def read(publication: Publication) -> Any:
    return decode_up(publication.kind, publication.payload)


def test_a_session_begins_with_birth_inventory_and_a_heartbeat() -> None:
    birth, inventory, beat = map(read, reporting().connected(7, state(), now=100.0, utc_s=UTC))
    assert birth == Birth(
        device="kiosk-1", epoch=7, sequence=1, mono_ms=10_000, boot="b1", urls=("10.0.0.7:9001",), offers=(offer(),),
        revision=1, interval_ms=1000, agent="0.1.0", utc_ms=1_800_000_000_000,
    )  # fmt: skip
    assert inventory == Inventory("kiosk-1", 7, 1, 10_000, (offer(),), 1)
    assert beat == Heartbeat(
        "kiosk-1", 7, 1, 10_000, 1000, inventory_hash((offer(),)), queued=0, in_flight=1, queue_delay_ms=250.0
    )


def test_births_deaths_and_inventories_are_retained_and_must_arrive_heartbeats_are_not() -> None:
    machine = reporting()
    birth, inventory, beat = machine.connected(7, state(), 100.0, UTC)
    will = machine.will(7)
    assert [(one.qos, one.retain) for one in (birth, inventory, will, beat)] == [(1, True)] * 3 + [(0, False)]


@pytest.mark.parametrize(("draw", "wait_s"), [(0.0, 0.9), (0.5, 1.0), (0.999, 1.1)])
def test_heartbeats_come_every_second_give_or_take_a_tenth(draw: float, wait_s: float) -> None:
    machine = reporting(draw)
    machine.connected(7, state(), 100.0, UTC)
    assert machine.next_wake(state()) == pytest.approx(100.0 + wait_s, abs=0.001)
    assert machine.due(state(), 100.0 + wait_s - 0.01, UTC) == []
    assert kinds(machine.due(state(), 100.0 + wait_s + 0.001, UTC)) == ["hb"]


def test_sequences_count_per_topic_and_never_restart_within_a_session() -> None:
    machine = reporting()
    machine.connected(7, state(), 100.0, UTC)
    (beat,) = machine.due(state(), 101.0, UTC)
    assert read(beat).sequence == 2
    again = [read(one) for one in machine.resync(state(), 101.5, UTC)]
    assert [one.sequence for one in again] == [2, 2, 3]
    machine.disconnected()
    assert [read(one).sequence for one in machine.connected(8, state(), 105.0, UTC)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("before", "after", "is_news"),
    [(0, 4, True), (0, 3, False), (10, 15, False), (10, 16, True), (10, 4, True), (10, 6, False), (6, 2, True)],
)
def test_a_queue_that_moved_by_more_than_half_and_four_is_told_at_once(before: int, after: int, is_news: bool) -> None:
    machine = reporting()
    machine.connected(7, state(before), 100.0, UTC)
    assert bool(machine.due(state(after), 100.1, UTC)) is is_news
    assert machine.next_wake(state(after)) == pytest.approx(101.1 if is_news else 101.0)


def test_news_wait_until_a_tenth_of_a_second_has_passed() -> None:
    machine = reporting()
    machine.connected(7, state(), 100.0, UTC)
    closed = state(admission="closed")
    assert machine.due(closed, 100.05, UTC) == []
    assert machine.next_wake(closed) == pytest.approx(100.1)
    (beat,) = machine.due(closed, 100.1, UTC)
    assert read(beat).admission == "closed"


def test_changed_offers_are_told_with_an_inventory_before_the_heartbeat_that_hashes_it() -> None:
    machine = reporting()
    machine.connected(7, state(), 100.0, UTC)
    changed = state(offers=(offer("minilm"),))
    assert machine.next_wake(changed) == pytest.approx(100.1)
    inventory, beat = map(read, machine.due(changed, 100.2, UTC))
    assert (inventory.revision, inventory.sequence) == (2, 2)
    assert beat.inventory == inventory_hash(changed.offers)
    equal = replace(changed, offers=(offer("minilm"),))
    assert machine.due(equal, 100.4, UTC) == []


def test_a_changed_address_is_told_with_a_new_birth_of_the_same_session() -> None:
    machine = reporting()
    machine.connected(7, state(), 100.0, UTC)
    moved = state(urls=("10.0.0.8:9001",), offers=(offer("minilm"),))
    birth, beat = map(read, machine.due(moved, 100.5, UTC))
    assert (birth.epoch, birth.sequence, birth.urls, birth.revision) == (7, 2, ("10.0.0.8:9001",), 2)
    assert beat.inventory == inventory_hash(moved.offers)


def test_outside_of_a_session_nothing_is_said() -> None:
    machine = reporting()
    assert machine.due(state(), 100.0, UTC) == []
    assert machine.resync(state(), 100.0, UTC) == []
    assert machine.farewell("shutdown") == []
    assert machine.next_wake(state()) is None
    assert (machine.epoch, repr(machine)) == (0, "<Reporting kiosk-1 no session, 0 heartbeats, revision 0>")


def test_a_goodbye_ends_the_session() -> None:
    machine = reporting()
    machine.connected(7, state(), 100.0, UTC)
    assert repr(machine) == "<Reporting kiosk-1 epoch 7, 1 heartbeats, revision 1>"
    (death,) = machine.farewell("update")
    assert read(death) == Death("kiosk-1", 7, "update")
    assert machine.due(state(), 105.0, UTC) == []


def test_the_will_speaks_for_its_own_epoch() -> None:
    assert read(reporting().will(9)) == Death("kiosk-1", 9, "lost")


def test_an_absurd_queue_delay_still_makes_a_message_that_gateways_accept() -> None:
    machine = reporting()
    load = LoadReport(1, 1, queued=2**31 - 1, in_flight=0, queue_delay_s=1e12)
    publications = machine.connected(7, state(load=load), 100.0, UTC)
    assert read(publications[-1]).queue_delay_ms == 3_600_000


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 50), st.booleans()), max_size=60))
def test_whatever_happens_heartbeats_keep_their_distance_and_gateways_stay_in_step(
    steps: list[tuple[float, int, bool]],
) -> None:
    machine, fleet, now = reporting(), register(), 100.0
    beats: list[float] = []
    current = state()
    publications = machine.connected(7, current, now, UTC)
    for wait_s, queued, swap in [(0.0, 0, False), *steps]:
        beats += [now for one in publications if one.kind is DeviceTopic.HEARTBEAT]
        for one in publications:
            assert fleet.fold(TOPICS.up("kiosk-1", one.kind), one.payload, now) == []
        (view,) = fleet.devices(now)
        if publications:
            assert view.offers == current.offers and view.freshness is Freshness.FRESH
        now += wait_s
        offers = (offer("minilm"),) if swap else (offer(),)
        current = state(queued, offers=offers, admission="closed" if swap else "open")
        publications = machine.due(current, now, UTC)
    gaps = [after - before for before, after in pairwise(beats)]
    assert all(gap >= 0.1 - 1e-9 for gap in gaps)


def test_a_battery_that_crosses_a_tenth_or_begins_to_charge_is_told_at_once() -> None:
    machine = reporting()
    machine.connected(7, state(conditions=DeviceConditions(battery=0.52)), 100.0, UTC)
    assert machine.due(state(conditions=DeviceConditions(battery=0.50)), 100.2, UTC) == []

    for last, conditions in (
        (100.0, DeviceConditions(battery=0.49)),
        (100.2, DeviceConditions(battery=0.49, charging=True)),
    ):
        assert machine.next_wake(state(conditions=conditions)) == pytest.approx(last + 0.1)
        (beat,) = map(read, machine.due(state(conditions=conditions), last + 0.2, UTC))
        assert beat.conditions == conditions


# --- rollouts --------------------------------------------------------------------------------------------------------


def rolling(state_is: RolloutState, done_bytes: int = 0) -> AgentState:
    return state(rollouts=RolloutReport(models=(ModelReport("digits", state_is, done_bytes=done_bytes),)))


def test_rollouts_are_told_when_a_session_begins_and_their_states_at_once() -> None:
    machine = reporting()
    began = machine.connected(7, rolling(RolloutState.PLANNED), 100.0, UTC)
    assert kinds(began) == ["birth", "inv", "reported", "hb"]
    assert read(began[2]).models[0].state is RolloutState.PLANNED
    after = rolling(RolloutState.DOWNLOADING)
    assert machine.next_wake(after) == pytest.approx(100.1)
    told = machine.due(after, 100.1, UTC)
    assert kinds(told)[0] == "reported"
    assert read(told[0]).sequence == 2


def test_progress_alone_is_told_every_five_seconds() -> None:
    machine = reporting()
    machine.connected(7, rolling(RolloutState.DOWNLOADING), 100.0, UTC)
    more = rolling(RolloutState.DOWNLOADING, done_bytes=5)
    early = [kind for second in range(1, 5) for kind in kinds(machine.due(more, 100.0 + second, UTC))]
    assert set(early) == {"hb"}
    assert "reported" in kinds(machine.due(more, 100.0 + PROGRESS_GAP_S, UTC))
    assert "reported" not in kinds(machine.due(more, 100.0 + 3 * PROGRESS_GAP_S, UTC))


def test_changed_settings_are_told_at_once_also_by_a_device_without_rollouts() -> None:
    machine = reporting()
    before = ConfigurationReport(RolloutState.COMMITTED, "d1")
    began = machine.connected(7, state(configuration=before), 100.0, UTC)
    told = read(next(one for one in began if one.kind is DeviceTopic.REPORTED))
    assert (told.configuration, told.takes_rollouts) == (before, False)
    assert machine.due(state(configuration=before), 101.2, UTC)[0].kind is DeviceTopic.HEARTBEAT

    after = ConfigurationReport(RolloutState.ACTIVE, "d2", scope="device/kiosk-1", revision=3)
    told = read(machine.due(state(configuration=after), 101.4, UTC)[0])
    assert told.configuration == after


def test_a_report_with_settings_is_read_by_a_gateway_that_knows_of_none_and_the_other_way_round() -> None:
    class OldReported(msgspec.Struct, frozen=True):
        device: str = msgspec.field(name="dev")
        accepted: dict[str, int] = {}

    settings = ConfigurationReport(RolloutState.FAILED, "d")
    full = Reported("kiosk-1", 1, 1, 0, accepted={"device/kiosk-1": 3}, configuration=settings)
    assert msgspec.json.decode(msgspec.json.encode(full), type=OldReported).accepted == {"device/kiosk-1": 3}
    old = decode_up(DeviceTopic.REPORTED, b'{"dev":"kiosk-1","e":1,"s":1,"m":0,"v":1}')
    assert isinstance(old, Reported) and (old.configuration, old.takes_rollouts) == (None, True)

"""The changes of a fleet, one by one, amount to looking at all of it again and again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet_sync.changes import PendingChanges
from gateway.fleet_sync.freshness import JUST_AFTER_S, DeviceView, Freshness
from gateway.fleet_sync.registry import FleetRegister
from tests.support.mqtt.device_messages import Device, offer, register
from tidegate.fleet.conditions import DeviceConditions
from tidegate.types import LoadReport

NAMES = ("a", "b", "c")
WORDS = (
    "birth", "beat", "slow beat", "closed", "conditions", "inventory", "goodbye", "will", "answer", "pong", "broken",
    "forget", "broker lost", "broker back", "nothing",
)  # fmt: skip


class Follower:
    """Knows a fleet by its changes alone, and wakes when the register says that the clock will change something."""

    def __init__(self, fleet: FleetRegister) -> None:
        self.fleet = fleet
        self.views: dict[str, DeviceView] = {}

    def until(self, now: float, then: float) -> None:
        """Look whenever there is something to look at."""
        while (wake := self.fleet.next_wake(now)) is not None and wake <= then:
            assert wake > now
            now = wake
            self.look(now)
        self.look(then)

    def look(self, now: float) -> None:
        while taken := self.fleet.changed(now, most=2):
            for name, view in taken:
                if view is None:
                    self.views.pop(name, None)
                else:
                    self.views[name] = view
        assert self.fleet.changed(now) == []


def lasting(view: DeviceView) -> DeviceView:
    """Without what moves while nothing happens, and without a load, which whoever was answered has heard himself."""
    return replace(view, age_s=0.0, reason="", load=None)


def say(fleet: FleetRegister, device: Device, word: str, now: float, number: int) -> None:
    match word:
        case "birth":
            device.epoch += 1
            fleet.fold(*device.birth(now), now, retained=number % 5 == 0)
        case "beat":
            fleet.fold(*device.heartbeat(now), now)
        case "slow beat":
            fleet.fold(*device.heartbeat(now, interval_ms=3000), now)
        case "closed":
            fleet.fold(*device.heartbeat(now, admission="closed"), now)
        case "conditions":
            fleet.fold(*device.heartbeat(now, conditions=DeviceConditions(battery=number % 10 / 10)), now)
        case "inventory":
            fleet.fold(*device.inventory(now, offer(version=str(number))), now)
        case "goodbye":
            fleet.fold(*device.goodbye(), now)
        case "will":
            fleet.fold(*device.will(), now)
        case "answer":
            fleet.data_plane(device.name, device.epoch, number, LoadReport(device.epoch, number, 1, 1, 0.0), now)
        case "pong":
            fleet.data_plane_alive(device.name, now)
        case "broken":
            fleet.data_plane_lost(device.name, now)
        case "forget":
            fleet.fold(device.birth(now)[0], b"", now)
        case "broker lost":
            fleet.control_plane(up=False, now=now)
        case "broker back":
            fleet.control_plane(up=True, now=now)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    said=st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.sampled_from(WORDS),
            st.sampled_from((0.0, 0.01, 0.4, 1.1, 2.3, 6.0)),
            st.booleans(),
        ),
        min_size=10,
        max_size=80,
    )
)
def test_following_the_changes_shows_the_same_as_looking_at_all_devices(
    said: list[tuple[str, str, float, bool]],
) -> None:
    """However late it comes to look: what it missed meanwhile, it sees then."""
    fleet, devices = register(), {name: Device(name) for name in NAMES}
    follower, now = Follower(fleet), 10.0
    for device in devices.values():
        fleet.fold(*device.birth(now), now)
    for number, (name, word, passed_s, looks) in enumerate(said, start=1):
        say(fleet, devices[name], word, now, number)
        if looks:
            follower.until(now, now + passed_s)
        now += passed_s
        wake = fleet.next_wake(now)
        if wake is not None and wake <= now + JUST_AFTER_S:  # at a limit itself its last digits decide
            follower.until(now, now := now + 3 * JUST_AFTER_S)
        assert not looks or {name: lasting(view) for name, view in follower.views.items()} == {
            view.name: lasting(view) for view in fleet.devices(now)
        }


def test_a_reader_that_never_looked_gets_each_device_once() -> None:
    fleet, device = register(), Device("a")
    fleet.fold(*device.birth(10.0), 10.0)
    for second in range(11, 40):
        fleet.fold(*device.heartbeat(float(second)), float(second))
    assert [name for name, _ in fleet.changed(40.0)] == ["a"]
    assert fleet.changed(40.0) == []


def test_those_that_have_waited_longest_are_told_first() -> None:
    fleet = register()
    for name in ("c", "a", "b"):
        fleet.fold(*Device(name).birth(10.0), 10.0)
    assert [name for name, _ in fleet.changed(10.0, most=2)] == ["c", "a"]
    assert [name for name, _ in fleet.changed(10.0, most=2)] == ["b"]


def test_a_device_that_was_forgotten_is_told_as_gone() -> None:
    fleet, device = register(), Device("a")
    topic, payload = device.birth(10.0)
    fleet.fold(topic, payload, 10.0)
    fleet.changed(10.0)
    fleet.fold(topic, b"", 11.0)
    assert fleet.changed(11.0) == [("a", None)]
    assert fleet.next_wake(11.0) is None


def test_answers_of_a_device_that_is_believed_to_live_are_no_change() -> None:
    fleet, device = register(), Device("a")
    fleet.fold(*device.birth(10.0), 10.0)
    fleet.changed(10.0)
    for sequence in range(1, 5):
        fleet.data_plane("a", device.epoch, sequence, None, 10.1)
    assert fleet.changed(10.1) == []


def test_an_answer_of_a_device_that_was_taken_for_dead_is_a_change() -> None:
    fleet, device = register(), Device("a")
    fleet.fold(*device.birth(10.0), 10.0)
    fleet.fold(*device.will(), 10.1)
    ((_, view),) = fleet.changed(13.0)
    assert view is not None and view.freshness is Freshness.DEAD
    fleet.data_plane("a", device.epoch, 1, None, 13.1)
    ((_, view),) = fleet.changed(13.1)
    assert view is not None and view.freshness is Freshness.CONTROL_LOST


def test_a_death_that_was_not_seen_before_an_answer_refuted_it_comes_back_when_the_answers_end() -> None:
    fleet, device = register(), Device("a")
    fleet.fold(*device.birth(10.0), 10.0)
    fleet.data_plane("a", device.epoch, 1, None, 10.0)
    assert fleet.next_wake(40.0) is None
    fleet.data_plane("a", device.epoch, 2, None, 40.0)
    ((_, view),) = fleet.changed(40.0)
    assert view is not None and view.freshness is Freshness.CONTROL_LOST
    assert fleet.next_wake(40.0) == pytest.approx(45.0, abs=0.01)


@pytest.mark.slow
def test_a_fleet_that_only_beats_costs_no_look_at_the_whole() -> None:
    """However many devices there are, a heartbeat is one look; and a wake-up is one for each time of silence begun."""
    fleet, devices = register(), [Device(f"d{number}") for number in range(500)]
    for device in devices:
        fleet.fold(*device.birth(10.0), 10.0)
    while fleet.changed(10.0):
        pass
    looks = 0
    for second in range(11, 31):
        for device in devices:
            fleet.fold(*device.heartbeat(float(second)), float(second))
        while taken := fleet.changed(float(second)):
            looks += len(taken)
    assert looks == 20 * len(devices)


@pytest.mark.parametrize("step_s", [-0.001, 0.001])
def test_instants_that_move_do_not_pile_up(step_s: float) -> None:
    changes = PendingChanges()
    for number in range(10_000):
        changes.sooner("a", 1e6 + number * step_s)
    assert changes.instants < 200

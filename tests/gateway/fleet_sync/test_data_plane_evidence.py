"""What answers and links say of a device beside MQTT: usable though the broker thinks it dead."""

from __future__ import annotations

import pytest

from tests.support.mqtt.device_messages import Device, register
from tests.support.mqtt.views import CONTROL_LOST, DEAD, FRESH, SUSPECT, alive, freshness, only
from tidegate.types import LoadReport

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


def test_the_load_that_came_last_counts_by_whichever_path() -> None:
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


def test_a_broken_data_link_is_suspect_until_the_device_sends_again_by_any_path() -> None:
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

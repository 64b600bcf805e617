"""This gateway's own outage: silence while it has no broker says nothing of devices, and excuses nothing for ever."""

from __future__ import annotations

import pytest

from tests.support.mqtt.views import CONTROL_LOST, DEAD, FRESH, alive, freshness, only


def test_silence_without_a_broker_says_nothing_about_devices() -> None:
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

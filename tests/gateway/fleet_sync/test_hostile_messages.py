"""What the fold refuses to believe, and that no flood of names, gaps or messages costs more than its bound."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from gateway.fleet_sync.registry import Resync
from tests.support.mqtt.device_messages import TOPICS, Device, register
from tests.support.mqtt.views import alive
from tidegate.fleet.topics import DeviceTopic


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
    fleet.fold(TOPICS.up("kiosk-1", DeviceTopic.BIRTH), b"", 11.0)
    fleet.fold(TOPICS.up("kiosk-1", DeviceTopic.INVENTORY), b"", 11.0)
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

        gc.disable()  # Hypothesis counts collections by a call of its own, which may fall into the fold
        sys.setprofile(count)
        try:
            fleet.fold(topic, payload, 10.5)
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls

    assert python_calls_of_one_fold(2) == python_calls_of_one_fold(500)

"""How a fleet register sees its devices: the shorthands of every test of the fold."""

from __future__ import annotations

from typing import Any

from gateway.fleet_sync.freshness import DeviceView, Freshness
from gateway.fleet_sync.registry import FleetRegister
from tests.support.mqtt.device_messages import Device, register

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

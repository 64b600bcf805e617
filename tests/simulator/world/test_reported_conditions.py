"""Conditions of a simulated fleet are reported: the device that became slow, and none in an ordinary office."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from gateway.core.fleet.target import TargetView
from gateway.core.health.degradation import ConditionChange
from simulator.scenarios.scenario import Fault, Scenario
from simulator.scenarios.scenario_file import load
from simulator.simulation import World

pytestmark = pytest.mark.slow


def told(scenario: Scenario, seed: int) -> list[tuple[str, str, bool]]:
    """Each change of a condition in one run: (target, condition, whether it began)."""
    found: list[tuple[str, str, bool]] = []

    def note(target: TargetView, change: ConditionChange) -> None:
        found.append((target.id, change.condition.name, change.begun))

    world = World(load("office_wifi").replaced(scenario), "tidegate", seed)
    for gateway in world.gateways:
        gateway.fleet.on_condition = note
    world.run()
    return found


def test_in_an_office_with_bursts_heat_and_weather_nothing_flaps() -> None:
    changes = Counter(told(load("office_wifi").scenario, 1))
    assert all(count == 1 for count in changes.values()), changes


def test_a_device_that_becomes_three_times_as_slow_is_named_and_no_other() -> None:
    office = load("office_wifi").scenario
    calm = tuple(msgspec.structs.replace(group, thermal=None, background=None) for group in office.edges)
    slow = Fault(kind="slow", at_s=110.0, for_s=60.0, target="edge/device-1", times=3.0)
    scenario = msgspec.structs.replace(office, edges=calm, faults=(slow,), duration_s=170.0).with_rate(40.0)
    begun = [(target, condition) for target, condition, begins in told(scenario, 1) if begins]
    assert [target for target, condition in begun if condition == "slow_drift"] == ["edge/device-1"]

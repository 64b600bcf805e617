"""The sensors read the kernel's files off the loop, and report changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edge_agent.device import sensors
from edge_agent.device.sensors import Sensors, read_conditions
from tidegate.fleet.conditions import UNTOLD, DeviceConditions


def sysfs(root: Path, *, capacity: int = 42, status: str = "Discharging") -> Path:
    files = {
        "power_supply/BAT0/type": "Battery",
        "power_supply/BAT0/capacity": str(capacity),
        "power_supply/BAT0/status": status,
        "thermal/thermal_zone0/type": "cpu-thermal",
        "thermal/thermal_zone0/temp": "48000",
        "thermal/cooling_device0/type": "Processor",
        "thermal/cooling_device0/cur_state": "2",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_the_files_of_sysfs_become_conditions(tmp_path: Path) -> None:
    assert read_conditions(sysfs(tmp_path), metered=True) == DeviceConditions(
        battery=0.42, charging=False, temperature_c=48.0, throttled=True, metered=True
    )


def test_what_is_not_there_or_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert read_conditions(None, metered=False) == read_conditions(tmp_path / "nothing", metered=False) == UNTOLD
    (sysfs(tmp_path) / "power_supply/BAT0/capacity").unlink()
    (tmp_path / "power_supply/BAT0/capacity").mkdir()  # whatever a driver may make of it
    (tmp_path / "thermal/thermal_zone0/temp").write_bytes(b"\xff\xfe")
    assert read_conditions(tmp_path, metered=False) == DeviceConditions(throttled=True)


async def test_a_change_is_noticed_and_told_once(tmp_path: Path) -> None:
    changed = asyncio.Event()
    async with Sensors(sysfs(tmp_path), metered=False, on_change=changed.set, poll_s=0.01) as watched:
        assert watched.now.battery == 0.42
        assert not changed.is_set()

        sysfs(tmp_path, capacity=43, status="Charging")

        async with asyncio.timeout(30.0):
            await changed.wait()
            while (watched.now.battery, watched.now.charging) != (0.43, True):
                changed.clear()
                await changed.wait()
        assert "battery at 43%, charging" in repr(watched)


async def test_without_a_folder_nothing_is_watched() -> None:
    async with Sensors(None, metered=True) as unwatched:
        assert unwatched.now == DeviceConditions(metered=True)
        assert {task.get_name() for task in asyncio.all_tasks()}.isdisjoint({"sensors"})


async def test_a_defect_while_reading_costs_the_state_and_not_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = asyncio.Event()
    async with Sensors(sysfs(tmp_path), metered=True, on_change=changed.set, poll_s=0.01) as watched:

        def broken(*_: object, **__: object) -> DeviceConditions:
            raise RuntimeError("a defect")

        monkeypatch.setattr(sensors, "conditions_of", broken)
        async with asyncio.timeout(30.0):
            await changed.wait()
        assert watched.now == DeviceConditions(metered=True)

        monkeypatch.undo()
        changed.clear()
        async with asyncio.timeout(30.0):
            await changed.wait()
        assert watched.now.battery == 0.42

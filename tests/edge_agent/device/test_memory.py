"""The memory watch reports a device's memory, and replaces leaking workers one at a time while no request waits."""

from __future__ import annotations

import os

import numpy as np
import pytest

from edge_agent.device.memory import LOOK_S, MemoryWatch
from tests.edge_agent.serving.test_runner import Stage
from tests.support.loop import on_virtual_time, settle
from tests.support.models.tiny_models import double_manifest
from tidegate import clock
from tidegate.fleet.conditions import DeviceConditions
from tidegate.outcome import Unreachable
from tidegate.workers.vitals import ProcessUsage

MIB = 2**20


class Kept:
    """A runner whose worker is process number `pid`."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid, self.ready = name, pid, True
        self.reasons: list[str] = []

    def recycle(self, reason: str) -> None:
        self.reasons.append(reason)
        self.ready = False

    def restarted(self, pid: int) -> None:
        self.pid, self.ready = pid, True


class Device:
    """Two models on a device with 1 GiB, of which the memory that no process holds is free."""

    def __init__(self) -> None:
        self.runners = [Kept("a:1", 11), Kept("b:1", 12)]
        self.held_mib = {os.getpid(): 80.0, 11: 100.0, 12: 100.0}
        self.now = 0.0
        self.busy = False
        self.watch = MemoryWatch(
            lambda: self.runners, lambda: 0.5, busy=lambda: self.busy, process=self._process, free=self._free
        )

    def _process(self, pid: int | None) -> ProcessUsage | None:
        held = self.held_mib.get(pid or 0)
        return None if held is None else ProcessUsage(held * MIB, 0.0)

    def _free(self) -> tuple[float, float]:
        return (1024.0 - sum(self.held_mib.values())) * MIB, 1024.0 * MIB

    def minutes(self, count: int, **grows_mib: float) -> None:
        """Look for so long; `p11=2.0` grows process 11 by 2 MiB a minute."""
        for _ in range(int(count * 60 / LOOK_S)):
            self.now += LOOK_S
            for name, mib in grows_mib.items():
                self.held_mib[int(name[1:])] += mib * LOOK_S / 60.0
            self.watch.replace_one(self.watch.survey(self.now), self.now)


def test_a_worker_that_takes_all_that_is_free_within_hours_is_replaced_and_its_neighbour_is_not() -> None:
    device = Device()
    device.minutes(40, p11=8.0)
    leaking, well = device.runners
    assert len(leaking.reasons) == 1
    assert leaking.reasons[0].startswith("leak: it holds ")
    assert well.reasons == []
    assert repr(device.watch) == "<MemoryWatch of 2 workers, 1 replaced>"


def test_memory_that_stays_or_goes_up_and_down_is_no_leak() -> None:
    device = Device()
    for _ in range(20):
        device.minutes(6, p11=5.0)
        device.held_mib[11] = 100.0
    assert device.watch.recycled == 0


def test_nobody_is_ended_while_requests_wait_nor_while_another_model_is_away() -> None:
    device = Device()
    device.busy = True
    device.minutes(40, p11=8.0)
    assert device.watch.recycled == 0
    device.busy, device.runners[1].ready = False, False
    device.minutes(2)
    assert device.watch.recycled == 0
    device.runners[1].ready = True
    device.minutes(1)
    assert device.runners[0].reasons


def test_two_that_leak_are_replaced_one_after_another_with_time_between() -> None:
    device = Device()
    device.minutes(40, p11=4.0, p12=4.0)
    first = next(one for one in device.runners if one.reasons)
    other = next(one for one in device.runners if not one.reasons)
    device.held_mib[21] = 100.0
    first.restarted(21)
    device.minutes(3, p12=4.0)
    assert other.reasons == []
    device.minutes(10, p12=4.0)
    assert other.reasons


def test_what_is_held_and_may_be_held_goes_out_with_the_conditions() -> None:
    device = Device()
    assert device.watch.told(DeviceConditions(battery=0.5)) == DeviceConditions(battery=0.5)
    device.minutes(1)
    told = device.watch.told(DeviceConditions(battery=0.5))
    assert (told.memory_bytes, told.memory_limit_bytes) == (280 * MIB, 1024 * MIB)
    assert told.battery == 0.5


@on_virtual_time
async def test_a_recycled_worker_fails_what_is_inside_and_is_replaced_by_another() -> None:
    stage = Stage()
    async with stage.running(double_manifest()) as runner:
        assert runner.ready
        runner.recycle("leak: it grows")
        await settle(20)
        with pytest.raises(Unreachable):
            await runner.infer("int8", {"x": np.zeros((1, 4), np.float32)})
        await clock.sleep(0.5)
        await settle()
        assert runner.ready
        assert len(stage.workers) == 2


@pytest.mark.slow
async def test_a_real_process_is_read() -> None:
    watch = MemoryWatch(tuple, lambda: 0.5)
    watch.survey(0.0)
    told = watch.told(DeviceConditions())
    assert told.memory_bytes is not None
    assert told.memory_bytes > 5 * MIB
    assert told.memory_limit_bytes is not None
    assert told.memory_limit_bytes > told.memory_bytes

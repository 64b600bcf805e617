"""Recycling of generating workers: which one, when, and when not: on virtual time, with readings as a test says."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from cloud_pool.workers.generating_recycling import GeneratingRecycling
from tests.support.loop import on_virtual_time, settle
from tidegate import clock
from tidegate.workers.recycling import Recycling
from tidegate.workers.vitals import ProcessUsage

GB = 2.0**30


class Readings:
    """One replica with one worker, and the memory that it and the machine have."""

    def __init__(self, *, after_requests: int = 0, horizon_s: float = 3600.0) -> None:
        self.rss_bytes, self.free_bytes, self.waiting = 1.0 * GB, 4.0 * GB, False
        self.asked: list[bool] = []
        self.worker = SimpleNamespace(pid=7, generated=0, on_device=None)
        self.replica = SimpleNamespace(
            workers={"w.1": self.worker}, state="ready", recycle=self.recycle, successor_beside=True
        )
        self.recycles = Counter[str]()
        self.watch = GeneratingRecycling(
            cast(Any, [self.replica]),
            Recycling(lambda: 0.5, gap_s=10**6, after_requests=after_requests),
            self.recycles,
            waiting=lambda: self.waiting,
            horizon_s=horizon_s,
            read=lambda pid: ProcessUsage(self.rss_bytes, 0.0),
            free=lambda: (self.free_bytes, 8 * GB),
        )

    async def recycle(self, *, successor_first: bool) -> bool:
        self.asked.append(successor_first)
        return True

    async def leak(self, minutes: int, bytes_a_minute: float) -> None:
        for _ in range(minutes):
            self.rss_bytes += bytes_a_minute
            self.free_bytes -= bytes_a_minute
            await clock.sleep(60.0)


@on_virtual_time
async def test_a_worker_whose_memory_will_be_full_is_replaced_and_its_successor_comes_first_where_there_is_room() -> (
    None
):
    one = Readings()
    async with one.watch:
        with capture_logs() as logs:
            await one.leak(30, 0.05 * GB)
    assert one.asked == [True] and one.recycles == {"leak": 1}
    assert [entry["event"] for entry in logs] == ["worker recycled"]


@on_virtual_time
async def test_without_room_for_two_the_old_one_goes_first() -> None:
    one = Readings()
    one.free_bytes = 1.0 * GB
    async with one.watch:
        await one.leak(30, 0.02 * GB)
    assert one.asked == [False]


@on_virtual_time
async def test_one_that_takes_its_whole_device_has_no_successor_beside_it() -> None:
    one = Readings()
    one.replica.successor_beside = False
    async with one.watch:
        await one.leak(30, 0.05 * GB)
    assert one.asked == [False]


@pytest.mark.parametrize("change", ["steady", "no horizon", "waiting", "another is missing"])
@on_virtual_time
async def test_nothing_is_replaced_without_a_reason_or_while_it_cannot_be_spared(change: str) -> None:
    one = Readings(horizon_s=0.0 if change == "no horizon" else 3600.0)
    one.waiting = change == "waiting"
    if change == "another is missing":
        one.replica.state = "loading"
    async with one.watch:
        await one.leak(30, 0.0 if change == "steady" else 0.05 * GB)
    assert one.asked == []


@on_virtual_time
async def test_a_worker_that_has_answered_enough_is_replaced_and_its_successor_begins_anew() -> None:
    one = Readings(after_requests=100)
    async with one.watch:
        one.worker.generated = 99
        one.watch.look()
        await settle()
        assert one.asked == []
        one.worker.generated = 100
        one.watch.look()
        await settle()
        assert one.asked == [True] and one.recycles == {"served": 1}
        one.replica.workers = {"w.2": SimpleNamespace(pid=8, generated=0, on_device=None)}
        one.watch.look()
        await settle()
    assert one.asked == [True]

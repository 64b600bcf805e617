"""What is done about a worker that is not what it was, and about memory and latency: virtual time, fake workers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from cloud_pool.core.health.adaptive_control import AdaptiveControl, ControlLimits
from cloud_pool.core.health.worker_health import HealthLimits
from cloud_pool.core.sharing.worker_layout import WorkerPlace
from cloud_pool.workers.health_controller import HealthController, cost_ratio
from tests.cloud_pool.workers.test_supervisor import LOADABLE, Pool, pool, service_s
from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.workers.recycling import Recycling
from tidegate.workers.vitals import ProcessUsage

GB = 1e9


@dataclass
class Watch:
    """A pool under a steward, with what the kernel would tell."""

    pool: Pool
    steward: HealthController
    rss_bytes: float = 0.2 * GB
    free: tuple[float, float] = (8 * GB, 16 * GB)
    logs: Any = field(default_factory=list)

    def events(self) -> list[str]:
        return [entry["event"] for entry in self.logs if entry["event"].startswith(("worker recycled", "control"))]

    async def looks(self, count: int, *, answers: int = 2) -> None:
        for _ in range(count):
            for _ in range(answers):
                await self.pool.answer()
            await clock.sleep(10.0)


@asynccontextmanager
async def watched(
    places: int = 1, control: ControlLimits | None = None, target_s: float | None = None, **recycling: Any
) -> AsyncIterator[Watch]:
    async with pool(places=[WorkerPlace(str(n)) for n in range(places)]) as subject:
        steward = HealthController(
            subject.supervisor,
            subject.scheduler,
            limits=HealthLimits(),
            recycling=Recycling(lambda: 0.5, **recycling),
            control=AdaptiveControl(control or ControlLimits()),
            latency_target_s=target_s,
            read=lambda pid: ProcessUsage(watch.rss_bytes, 0.0),
            free=lambda: watch.free,
        )
        watch = Watch(subject, steward)
        with capture_logs() as logs:
            watch.logs = logs
            async with steward:
                yield watch


@on_virtual_time
async def test_a_worker_in_good_health_is_left_alone() -> None:
    async with watched() as watch:
        await watch.looks(100)
        assert watch.events() == []
        assert len(watch.pool.processes) == 1
        assert "busy" in repr(watch.steward)


@on_virtual_time
async def test_one_that_has_grown_is_replaced_with_the_reason_in_the_log_and_in_the_count() -> None:
    async with watched() as watch:
        await watch.looks(3)
        watch.rss_bytes = 0.4 * GB
        await watch.looks(4)
        (entry,) = [entry for entry in watch.logs if entry["event"] == "worker recycled"]
        assert (entry["worker"], entry["successor_first"]) == ("0.1", True)
        assert entry["reason"] == "memory: 400 MB, warm it had 200"
        assert watch.steward.recycles == {"memory": 1}
        assert [process.alive for process in watch.pool.processes] == [False, True]
        assert await watch.pool.answer() == 8.0
        await watch.looks(1)
        assert list(watch.steward.health) == ["0.2"]


@on_virtual_time
async def test_where_two_do_not_fit_the_old_one_goes_first() -> None:
    async with watched() as watch:
        watch.free = (0.1 * GB, 16 * GB)
        await watch.looks(3)
        watch.rss_bytes = 0.4 * GB
        await watch.looks(4)
        (entry,) = [entry for entry in watch.logs if entry["event"] == "worker recycled"]
        assert entry["successor_first"] is False
        assert await watch.pool.answer() == 8.0


@on_virtual_time
async def test_two_ill_ones_are_replaced_one_after_the_other_with_a_gap() -> None:
    async with watched(places=2, gap_s=300.0) as watch:
        await watch.looks(3)
        watch.rss_bytes = 0.4 * GB
        await watch.looks(4)
        watch.rss_bytes = 0.4 * GB
        assert watch.events() == ["worker recycled"]
        began_at = clock.now()
        while len(watch.events()) < 2:
            await watch.looks(1)
        assert clock.now() - began_at > 300.0


@on_virtual_time
async def test_nobody_is_replaced_in_overload() -> None:
    async with watched() as watch:
        await watch.looks(3)
        watch.rss_bytes = 0.4 * GB
        for _ in range(6):
            watch.pool.scheduler.refused += 1
            await watch.looks(1)
        assert watch.events() == []
        await watch.looks(2)
        assert watch.events() == ["worker recycled"]


@on_virtual_time
async def test_after_so_many_answers_a_worker_is_replaced_and_the_learned_costs_stay() -> None:
    async with watched(after_requests=20) as watch:
        lane = watch.pool.supervisor.lanes[LOADABLE.key]
        await watch.looks(12)
        assert watch.steward.recycles == {"served": 1}
        assert watch.pool.supervisor.lanes[LOADABLE.key] is lane
        assert lane.statistics.execution_count >= 20


@on_virtual_time
async def test_a_worker_that_has_become_slow_is_replaced() -> None:
    async with watched() as watch:
        await watch.looks(40)
        watch.pool.processes[0].service_s = lambda inputs: 2.0 * service_s(inputs)
        await watch.looks(40)
        assert watch.steward.recycles == {"drift": 1}


@on_virtual_time
async def test_short_memory_holds_workers_back_and_each_turn_is_logged_and_counted() -> None:
    async with watched(places=2) as watch:
        watch.free = (0.05 * 16 * GB, 16 * GB)
        await watch.looks(2)
        assert watch.pool.scheduler.seats.most_at_once == 1
        assert watch.steward.turns == {("concurrency", "memory"): 1}
        (entry,) = [entry for entry in watch.logs if entry["event"] == "control"]
        assert (entry["knob"], entry["value"], entry["reason"]) == ("concurrency", 1, "memory 95%, over 90%")
        watch.free = (8 * GB, 16 * GB)
        await watch.looks(5)
        assert watch.pool.scheduler.seats.most_at_once > 2


@pytest.mark.slow
@on_virtual_time
async def test_late_answers_turn_to_the_lesser_precision_where_it_is_allowed() -> None:
    limits = ControlLimits(may_degrade=True, patience_s=30.0, dwell_s=10.0)
    async with watched(control=limits, target_s=0.001) as watch:
        await watch.looks(20, answers=30)
        assert watch.steward.control.degraded
        assert watch.steward.turns["precision", "p99"] == 1


@on_virtual_time
async def test_a_pool_so_late_that_it_answers_little_turns_too_and_back_when_nothing_comes() -> None:
    limits = ControlLimits(may_degrade=True, patience_s=30.0, dwell_s=10.0)
    async with watched(control=limits, target_s=0.001) as watch:
        await watch.looks(25, answers=3)
        assert watch.steward.control.degraded
        await watch.looks(25, answers=0)
        assert not watch.steward.control.degraded


@on_virtual_time
async def test_a_defect_in_looking_ends_neither_the_looking_nor_the_service() -> None:
    async with watched() as watch:
        watch.free = (1.0, 0.0)
        await watch.looks(2)
        assert any(entry["log_level"] == "error" for entry in watch.logs)
        watch.free = (8 * GB, 16 * GB)
        await watch.looks(1)
        assert watch.steward.memory_ratio == pytest.approx(0.5)


@on_virtual_time
async def test_a_model_without_a_lesser_variant_costs_the_same() -> None:
    async with watched() as watch:
        assert cost_ratio(watch.pool.supervisor.lanes.values(), "bf16") == 1.0


@on_virtual_time
async def test_by_default_batches_that_alone_make_answers_later_than_half_of_the_models_budget_become_smaller() -> None:
    async with watched() as watch:
        watch.pool.processes[0].service_s = lambda inputs: 0.35 * inputs["ids"].shape[0]
        for _ in range(6):
            await asyncio.gather(*[watch.pool.answer() for _ in range(8)])  # in 0.35 + 2.45 s, by a budget of 2 s
            await clock.sleep(5.0)
        assert watch.steward.turns == {("batch_cap", "p99"): 1}
        (entry,) = [entry for entry in watch.logs if entry["event"] == "control"]
        assert "of its target" in entry["reason"]


@on_virtual_time
async def test_rows_that_are_late_alone_are_no_reason_for_smaller_batches() -> None:
    async with watched() as watch:
        watch.pool.processes[0].service_s = lambda _: 1.5
        await watch.looks(10, answers=3)
        assert watch.steward.turns == {}


@pytest.mark.slow
@on_virtual_time
async def test_by_default_a_worker_whose_slowest_batches_take_half_of_the_models_budget_is_replaced() -> None:
    async with watched() as watch:
        turns = itertools.count()
        watch.pool.processes[0].service_s = lambda inputs: service_s(inputs) if next(turns) % 20 else 1.2
        await watch.looks(12, answers=30)
        assert watch.steward.recycles == {"p99": 1}

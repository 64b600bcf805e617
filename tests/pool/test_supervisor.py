"""One worker after another: on virtual time, with fake workers that die when they are told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cloud_pool.scheduler import Ask, Scheduler
from cloud_pool.supervisor import CRASH_LOOP, HEALTHY_S, Supervisor
from cloud_pool.worker import Loadable
from tests.pool.models import TEXT
from tests.pool.workers import Arrays, FakeProcess, text
from tests.support.loop import on_virtual_time, settle
from tidegate import clock
from tidegate.backoff import Backoff
from tidegate.process import StartError

LOADABLE = Loadable(TEXT, TEXT.variants[0], Path(__file__))


def service_s(inputs: Arrays) -> float:
    return 0.001 * inputs["ids"].size


@dataclass
class Pool:
    scheduler: Scheduler
    supervisor: Supervisor
    states: list[str]
    progress: list[str]
    processes: list[FakeProcess] = field(default_factory=list)

    async def answer(self, budget_s: float = 60.0) -> float:
        now = clock.now()
        answer = await self.scheduler.submit(LOADABLE.key, Ask(text(8), 8.0, now, now + budget_s))
        return float(answer.outputs["sum"][0, 0])


@asynccontextmanager
async def pool(
    loadable: Loadable = LOADABLE, service_s: Callable[[Arrays], float] = service_s, hang_timeout_s: float = 30.0
) -> AsyncIterator[Pool]:
    states, progress, processes = list[str](), list[str](), list[FakeProcess]()

    def start_process(life: str) -> FakeProcess:
        processes.append(FakeProcess(service_s))
        return processes[-1]

    async with Scheduler() as scheduler:
        supervisor = Supervisor(
            [loadable],
            scheduler,
            start_process=start_process,
            backoff=Backoff(lambda: 1.0, base_s=0.5, cap_s=30.0),
            hang_timeout_s=hang_timeout_s,
            on_change=lambda: states.append(supervisor.state),
            on_progress=progress.append,
        )
        with capture_logs():
            async with supervisor:
                yield Pool(scheduler, supervisor, states, progress, processes)


@on_virtual_time
async def test_it_is_ready_when_everything_is_loaded_and_measured() -> None:
    async with pool() as subject:
        assert subject.states == ["warming", "ready"]
        assert subject.progress == ["loading text:1/fp32", "measuring text:1/fp32"]
        assert dict(subject.supervisor.lanes[LOADABLE.key].cost)[256.0] == pytest.approx(0.256)
        assert await subject.answer() == 8.0
        assert repr(subject.supervisor) == "<Supervisor ready, life 1, 1 variants>"


@on_virtual_time
async def test_a_worker_that_died_is_replaced_after_a_wait_and_warmed_without_measuring() -> None:
    async with pool() as subject:
        subject.processes[0].kill()
        await settle(20)
        assert subject.supervisor.state == "loading"
        died_at = clock.now()
        assert await subject.answer() == 8.0
        assert subject.states == ["warming", "ready", "loading", "ready"]
        assert clock.now() - died_at == pytest.approx(0.5 + 0.001 + 0.512 + 0.008)
        assert [inputs["ids"].shape for inputs in subject.processes[1].begun] == [(1, 1), (8, 64), (1, 8)]


@on_virtual_time
async def test_a_worker_that_hangs_is_replaced() -> None:
    turns = iter([0.001] * 40 + [1e9] + [0.001] * 40)
    async with pool(service_s=lambda _: next(turns), hang_timeout_s=2.0) as subject:
        while len(subject.processes[0].begun) < 40:
            await subject.answer()
        assert await subject.answer() == 8.0
        assert len(subject.processes) == 2


@on_virtual_time
async def test_a_worker_that_dies_again_and_again_is_called_bad_and_still_tried() -> None:
    async with pool() as subject:
        for _ in range(CRASH_LOOP):
            subject.processes[-1].kill()
            await settle(20)
            lives = len(subject.processes)
            state = subject.supervisor.state
            while len(subject.processes) == lives or subject.supervisor.state != "ready":
                await clock.sleep(0.1)
        assert state == "bad"
        assert await subject.answer() == 8.0


@on_virtual_time
async def test_a_stretch_of_health_forgets_earlier_deaths() -> None:
    async with pool() as subject:
        for _ in range(2 * CRASH_LOOP):
            await clock.sleep(HEALTHY_S)
            subject.processes[-1].kill()
            await settle(20)
            assert subject.supervisor.state == "loading"
            await clock.sleep(10.0)
        assert subject.supervisor.state == "ready"


@on_virtual_time
async def test_an_artefact_that_does_not_load_is_a_reason_not_to_start() -> None:
    missing = Loadable(TEXT, TEXT.variants[0], Path("/nowhere/text.onnx"))
    with pytest.raises(StartError, match=r"/nowhere/text\.onnx"):
        async with pool(missing):
            raise AssertionError("it started")


@on_virtual_time
async def test_a_worker_that_never_gets_warm_is_a_reason_not_to_start() -> None:
    with pytest.raises(StartError, match="hung for 30 s"):
        async with pool(service_s=lambda _: 1e9):
            raise AssertionError("it started")

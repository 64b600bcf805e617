"""Callers of a pool without a worker are refused, kept, or given a time to come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.cloud_pool.workers_support import text
from tests.support.loop import elapsed, on_virtual_time, settle
from tests.support.pool.fake_worker import FakeWorker
from tests.support.pool.lane_pool import KEY, RESTART_S, WORKER, by, pool, service_s, total
from tidegate import clock
from tidegate.outcome import DeadlineExceeded, Poisonous, Unreachable
from tidegate.workers.process import EngineSpec, WorkerDied


@on_virtual_time
async def test_a_batch_that_took_its_worker_down_is_tried_again_one_by_one() -> None:
    async with pool() as subject, FakeWorker(service_s=service_s) as second:
        callers = [subject.ask(text(10, fill=n)) for n in (1, 2)]
        await settle()
        with capture_logs():
            subject.worker.kill()
            await settle()
        await second.load(EngineSpec(KEY, "onnx", Path(__file__), ()))
        subject.scheduler.attach(WORKER, by(second), restart_s=RESTART_S)
        assert [total(answer) for answer in await asyncio.gather(*callers)] == [10.0, 20.0]
        assert [len(inputs["ids"]) for inputs in second.begun] == [1, 1]


@on_virtual_time
async def test_who_kills_two_workers_is_not_given_a_third() -> None:
    async with pool() as subject, FakeWorker(service_s=service_s) as second:
        poison = subject.ask(text(10))
        await settle()
        with capture_logs():
            subject.worker.kill()
            await settle()
            await second.load(EngineSpec(KEY, "onnx", Path(__file__), ()))
            subject.scheduler.attach(WORKER, by(second), restart_s=RESTART_S)
            await settle()
            second.kill()
            with pytest.raises(Poisonous):
                await poison


@on_virtual_time
async def test_only_those_with_time_wait_for_the_next_worker() -> None:
    async with pool() as subject:
        running = subject.ask(text(10), budget_s=1.0)
        await settle()
        patient, hurried = subject.ask(text(10), budget_s=60.0), subject.ask(text(10), budget_s=2.0)
        await settle()
        subject.worker.kill()
        failures, took_s = await elapsed(asyncio.gather(running, hurried, return_exceptions=True))
        assert [type(failure) for failure in failures] == [WorkerDied, WorkerDied]
        assert took_s == 0.0
        with pytest.raises(WorkerDied):
            await subject.ask(text(10), budget_s=2.0)
        assert subject.scheduler.queue_delay_s(clock.now()) == pytest.approx(RESTART_S + 0.2)
        assert "<WorkerSlots none: " in repr(subject.scheduler)
        assert not patient.done()
        patient.cancel()


@on_virtual_time
async def test_who_waits_in_vain_for_a_worker_is_answered_in_time() -> None:
    async with pool() as subject:
        subject.scheduler.detach(WORKER, "gone")
        started_at = clock.now()
        with pytest.raises(DeadlineExceeded):
            await subject.ask(text(10), budget_s=10.0)
        assert clock.now() - started_at < 10.0


@on_virtual_time
async def test_a_lane_that_is_not_open_is_named() -> None:
    async with pool() as subject:
        with pytest.raises(Unreachable, match="nothing"):
            await subject.ask(text(10), key="nothing")

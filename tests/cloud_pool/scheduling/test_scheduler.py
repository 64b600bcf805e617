"""Callers of a busy pool get their answers and refusals in time: virtual time, with a fake worker.

Several of these are other servers' production bugs (docs/design/batching.md, "Scheduler invariants"); their names say
which.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.scheduling.job import PoolRequest, PoolResult
from tests.cloud_pool.models import TEXT, manifest_of
from tests.cloud_pool.workers_support import text
from tests.support.loop import elapsed, on_virtual_time, settle
from tests.support.pool.fake_worker import BAD_ID
from tests.support.pool.lane_pool import COST, KEY, RESTART_S, WORKER, pool, service_s, total
from tidegate import clock
from tidegate.models.manifest import Batching, QueuePolicy
from tidegate.outcome import DeadlineExceeded, InternalError, Overloaded, Unreachable
from tidegate.types import Accepted
from tidegate.workers.process import ComputeResult, EngineSpec


@on_virtual_time
async def test_an_idle_pool_computes_at_once() -> None:
    async with pool() as subject:
        answer, took_s = await elapsed(subject.ask(text(10, fill=3)))
        assert took_s == pytest.approx(0.2)
        assert total(answer) == 30.0
        assert (answer.queue_s, answer.compute_s, answer.batch_rows) == (0.0, pytest.approx(0.2), 1)


@on_virtual_time
async def test_who_comes_while_a_batch_runs_leaves_in_the_next_one_together() -> None:
    async with pool() as subject:
        callers = [subject.ask(text(10, fill=n)) for n in (1,)]
        await settle()
        callers += [subject.ask(text(10, fill=n)) for n in (2, 3, 4)]
        answers = await asyncio.gather(*callers)
        assert [total(answer) for answer in answers] == [10.0, 20.0, 30.0, 40.0]
        assert subject.batches == [1, 3]
        assert [answer.batch_rows for answer in answers] == [1, 3, 3, 3]
        assert answers[-1].queue_s == pytest.approx(0.2)


@on_virtual_time
async def test_results_are_not_crossed_between_callers_of_unequal_length() -> None:
    async with pool() as subject:
        callers = [subject.ask(text(length, fill=length)) for length in (12, 9, 11, 10, 12, 9)]
        answers = await asyncio.gather(*callers)
        assert [total(answer) for answer in answers] == [144.0, 81.0, 121.0, 100.0, 144.0, 81.0]
        assert [answer.outputs["twice"].shape for answer in answers] == [(1, n) for n in (12, 9, 11, 10, 12, 9)]
        assert len(subject.batches) < 6


@on_virtual_time
async def test_a_caller_who_leaves_while_waiting_frees_its_place_and_is_never_computed() -> None:
    async with pool() as subject:
        first = subject.ask(text(50))
        await settle()
        leaving, staying = subject.ask(text(10, fill=7)), subject.ask(text(10, fill=8))
        await settle()
        assert subject.scheduler.queued == 2
        leaving.cancel()
        await settle()
        assert subject.scheduler.queued == 1
        assert total(await staying) == 80.0
        await first
        assert not any((inputs["ids"] == 7).any() for inputs in subject.worker.begun)


@on_virtual_time
async def test_a_caller_who_leaves_during_its_batch_does_not_disturb_its_batch_mates() -> None:
    """Setting the result of a cancelled future took Ray Serve's batcher down (ray#41057, ray#50046)."""
    async with pool() as subject:
        first = subject.ask(text(10))
        await settle()
        leaving, staying = subject.ask(text(10, fill=7)), subject.ask(text(10, fill=8))
        await first
        await settle()
        assert subject.batches == [1, 2]
        leaving.cancel()
        assert total(await staying) == 80.0
        assert total(await subject.ask(text(10, fill=9))) == 90.0


@on_virtual_time
async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    async with pool(manifest_of(batching=Batching(max_batch_size=8, max_queue_size=2, pad_axis="sequence"))) as subject:
        callers = [subject.ask(text(10))]
        await settle()
        callers += [subject.ask(text(10)) for _ in range(2)]
        await settle()
        came_at = clock.now()
        with pytest.raises(Overloaded) as refused:
            await subject.ask(text(10))
        assert clock.now() == came_at
        assert refused.value.retry_after_s is not None and 0.05 <= refused.value.retry_after_s < 1.0
        await asyncio.gather(*callers)


@on_virtual_time
async def test_a_request_that_finds_its_level_full_waits_lower_where_that_is_allowed_and_is_counted() -> None:
    level = QueuePolicy(max_queue_size=1, demote_when_full=True)
    batching = Batching(max_batch_size=8, priority_queue_policy={2: level}, pad_axis="sequence")
    async with pool(manifest_of(batching=batching)) as subject:
        callers = [subject.ask(text(10))]
        await settle()
        callers += [subject.ask(text(10)) for _ in range(3)]
        await settle()
        assert subject.scheduler.queued == 3
        await asyncio.gather(*callers)
        assert [(asked, level, count) for (_, asked, level), count in subject.scheduler.demoted.items()] == [
            ("2", "3", 2)
        ]


@on_virtual_time
async def test_a_batch_that_waits_for_a_busy_worker_is_not_dispatched_late() -> None:
    async with pool() as subject:
        first = subject.ask(text(10))
        await settle()
        await asyncio.gather(first, *[subject.ask(text(10)) for _ in range(2)])
        (counted,) = subject.scheduler.batches.dispatch_s.values()
        assert (counted.count, counted.total) == (2, 0.0)


@on_virtual_time
async def test_what_a_due_batch_waits_beside_a_free_worker_is_counted() -> None:
    async with pool() as subject:
        await clock.sleep(1.0)
        now = clock.now()
        await subject.scheduler.submit(KEY, PoolRequest(text(10), 10.0, now - 0.05, now + 100.0))
        (counted,) = subject.scheduler.batches.dispatch_s.values()
        assert (counted.count, counted.total) == (1, pytest.approx(0.05))


@on_virtual_time
async def test_what_runs_out_of_time_while_a_batch_runs_is_answered_by_a_timer_and_costs_nothing() -> None:
    """Triton's expired requests wait until its instance is free (triton-inference-server#7512)."""
    async with pool() as subject:
        long = subject.ask(text(200))
        await settle()
        started_at = clock.now()
        with pytest.raises(DeadlineExceeded):
            await subject.ask(text(10), budget_s=1.0)
        assert clock.now() - started_at == pytest.approx(1.0 - 0.6 * 0.2, abs=0.01)
        await long
        assert subject.batches == [1]


@on_virtual_time
async def test_what_is_provably_too_late_is_refused_at_the_door() -> None:
    async with pool() as subject:
        with pytest.raises(DeadlineExceeded):
            await subject.ask(text(100), budget_s=0.5)
        assert subject.batches == []


@on_virtual_time
async def test_a_caller_hears_its_place_and_its_predicted_end() -> None:
    async with pool() as subject:
        heard: list[Accepted] = []
        first = subject.ask(text(90))
        await settle()
        second = subject.ask(text(40), budget_s=20.0)
        await settle()
        third = subject.ask(text(20), on_accepted=heard.append)
        await settle()
        assert heard == [Accepted(queue_ahead=2, finish_in_s=pytest.approx(1.0 + 0.5 + 0.3))]
        await asyncio.gather(first, second, third)


@on_virtual_time
async def test_the_load_is_what_waits_and_what_runs() -> None:
    async with pool() as subject:
        assert (subject.scheduler.queued, subject.scheduler.in_flight) == (0, 0)
        assert subject.scheduler.queue_delay_s(clock.now()) == 0.0
        callers = [subject.ask(text(90))]
        await settle()
        callers += [subject.ask(text(10)), subject.ask(text(10))]
        await settle()
        assert (subject.scheduler.queued, subject.scheduler.in_flight) == (2, 1)
        assert subject.scheduler.queue_delay_s(clock.now()) == pytest.approx(1.0 + 0.2 + 0.2)
        assert repr(subject.scheduler) == "<PoolScheduler <WorkerSlots 1 of 1 computing>, 2 waiting, 1 in flight>"
        await asyncio.gather(*callers)


@on_virtual_time
async def test_a_large_request_runs_in_parts_and_is_answered_whole() -> None:
    async with pool() as subject:
        arrays = text(5, rows=20)
        arrays["ids"][:, 0] = range(20)
        answer = await subject.ask(arrays)
        assert answer.outputs["sum"][:, 0].tolist() == [4.0 + n for n in range(20)]
        assert sorted(subject.batches) == [4, 8, 8]
        assert answer.compute_s == pytest.approx(2 * 0.5 + 0.3)


@on_virtual_time
async def test_when_one_part_of_a_request_fails_the_rest_is_not_computed() -> None:
    async with pool() as subject:
        arrays = text(5, rows=24)
        arrays["ids"][0, 0] = BAD_ID
        with pytest.raises(InternalError):
            await subject.ask(arrays)
        await settle()
        assert subject.batches == [8], "nor the second, which the worker had already for the moment after the first"
        assert subject.scheduler.queued == subject.scheduler.in_flight == 0


@on_virtual_time
async def test_lanes_share_the_worker_by_deadline() -> None:
    async with pool() as subject:
        other = ModelInstance("other", TEXT, TEXT.variants[0], COST)
        subject.scheduler.open(other)
        await subject.worker.load(EngineSpec("other", "onnx", Path(__file__), ()))
        first = subject.ask(text(10))
        await settle()
        late = subject.ask(text(10, fill=2), budget_s=50.0)
        soon = subject.ask(text(10, fill=3), budget_s=5.0, key="other")
        await asyncio.gather(first, late, soon)
        assert [int(inputs["ids"][0, 0]) for inputs in subject.worker.begun] == [1, 3, 2]


@on_virtual_time
async def test_closing_answers_everyone_who_still_waits() -> None:
    async with pool() as subject:
        callers = [subject.ask(text(100))]
        await settle()
        callers.append(subject.ask(text(10)))
        await settle()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(result) for result in results] == [Unreachable, Unreachable]
    with pytest.raises(Unreachable, match="shutting down"):
        await subject.ask(text(10))


@on_virtual_time
async def test_draining_waits_for_everyone() -> None:
    async with pool() as subject:
        await subject.scheduler.drained()
        callers = [subject.ask(text(10)) for _ in range(3)] + [subject.ask(text(200))]
        await settle()
        await subject.scheduler.drained()
        assert all(caller.done() for caller in callers) or await asyncio.gather(*callers)
        assert subject.scheduler.queued == subject.scheduler.in_flight == 0


@pytest.mark.slow
@on_virtual_time
async def test_predictions_follow_what_batches_really_take() -> None:
    async with pool() as subject:

        async def throttled(key: str, inputs: Any, patience_s: float) -> ComputeResult:
            await clock.sleep(service_s(inputs))
            return await subject.worker.infer(key, inputs)

        subject.scheduler.detach(WORKER, "gone")
        subject.scheduler.attach("0.2", throttled, restart_s=RESTART_S)
        for _ in range(80):
            await subject.ask(text(10))
        assert subject.lane.service.predict_s(10, 10) == pytest.approx(0.4, rel=0.1)


@on_virtual_time
async def test_statistics_count_rows_and_batches() -> None:
    async with pool() as subject:
        await asyncio.gather(*[subject.ask(text(10)) for _ in range(3)])
        statistics = subject.lane.statistics
        assert (statistics.inference_count, statistics.execution_count) == (3, 1)
        assert {rows: tally.count for rows, tally in statistics.batches.items()} == {3: 1}


@on_virtual_time
async def test_a_partial_batch_is_held_back_for_batch_mates_if_the_manifest_says_so() -> None:
    batching = Batching(max_batch_size=4, max_queue_delay_s=0.5, pad_axis="sequence", policy="window")
    held = manifest_of(batching=batching)
    async with pool(held) as subject:
        first = subject.ask(text(10))
        await clock.sleep(0.2)
        second = subject.ask(text(10))
        answers = await asyncio.gather(first, second)
        assert subject.batches == [2]
        assert answers[0].queue_s == pytest.approx(0.5)
        assert answers[1].queue_s == pytest.approx(0.3)


@pytest.mark.slow
@on_virtual_time
async def test_a_thousand_callers_who_come_and_leave_as_they_like_are_each_answered_once() -> None:
    random = np.random.default_rng(3)
    async with pool(
        manifest_of(batching=Batching(max_batch_size=8, max_queue_size=64, pad_axis="sequence"))
    ) as subject:
        outcomes: dict[str, int] = {}

        async def caller(number: int) -> None:
            await clock.sleep(float(random.exponential(20.0)))
            length = int(random.integers(1, 60))
            task = subject.ask(text(length, fill=number % 900 + 1), budget_s=float(random.uniform(0.2, 20.0)))
            if random.random() < 0.2:
                await clock.sleep(float(random.uniform(0.0, 2.0)))
                task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(result, PoolResult):
                assert total(result) == length * (number % 900 + 1)
            outcomes[type(result).__name__] = outcomes.get(type(result).__name__, 0) + 1

        await asyncio.gather(*[caller(number) for number in range(1000)])
        assert sum(outcomes.values()) == 1000
        assert set(outcomes) == {"PoolResult", "CancelledError", "DeadlineExceeded", "Overloaded"}
        assert subject.scheduler.queued == subject.scheduler.in_flight == len(subject.lane.batcher) == 0

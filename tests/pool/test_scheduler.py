"""What callers of a busy pool hear, and when: on virtual time, with a fake worker that takes what the model says.

Several of these are other servers' production bugs (`reference/batching.md` D.2); their names say which.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from cloud_pool.core.lane import Lane
from cloud_pool.job import Answer, Ask
from cloud_pool.scheduler import Scheduler
from cloud_pool.seats import Compute
from tests.pool.models import TEXT, manifest_of
from tests.pool.workers import Arrays, text
from tests.support.fake_worker import BAD_ID, FakeWorker
from tests.support.loop import elapsed, on_virtual_time, settle
from tidegate import clock
from tidegate.models.manifest import Batching, Manifest
from tidegate.outcome import DeadlineExceeded, InternalError, Overloaded, Poisonous, Unreachable
from tidegate.types import Accepted
from tidegate.workers.process import Computed, EngineSpec, WorkerDied

KEY = "text:1/fp32"
WORKER = "0.1"
RESTART_S = 3.0


def service_s(inputs: Arrays) -> float:
    """Seconds of a call: a tenth, and a hundredth for each token, padding included."""
    return 0.1 + 0.01 * inputs["ids"].size


COST = [(1.0, 0.11), (1000.0, 10.1)]


class Pool:
    """A scheduler with one lane over a fake worker."""

    def __init__(self, scheduler: Scheduler, worker: FakeWorker, lane: Lane) -> None:
        self.scheduler, self.worker, self.lane = scheduler, worker, lane

    def ask(self, arrays: Arrays, *, budget_s: float = 100.0, key: str = KEY, **more: Any) -> asyncio.Task[Answer]:
        """A caller in a task of its own."""
        now = clock.now()
        ask = Ask(arrays, float(arrays["ids"].size), now, now + budget_s, **more)
        return asyncio.create_task(self.scheduler.submit(key, ask))

    @property
    def batches(self) -> list[int]:
        """The rows of each batch that has begun."""
        return [len(inputs["ids"]) for inputs in self.worker.begun]


@asynccontextmanager
async def pool(manifest: Manifest = TEXT) -> AsyncIterator[Pool]:
    async with FakeWorker(service_s=service_s) as worker, Scheduler() as scheduler:
        await worker.load(EngineSpec(KEY, "onnx", Path(__file__), ()))
        lane = Lane(KEY, manifest, manifest.variants[0], COST)
        scheduler.open(lane)
        scheduler.attach(WORKER, by(worker), restart_s=RESTART_S)
        yield Pool(scheduler, worker, lane)


def by(worker: FakeWorker) -> Compute:
    """What `DeviceWorker` adds is tested with the supervisor."""

    async def compute(key: str, inputs: Arrays, patience_s: float) -> Computed:
        return await worker.infer(key, inputs)

    return compute


def total(answer: Answer) -> float:
    return float(answer.outputs["sum"][0, 0])


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
async def test_one_bad_request_does_not_fail_its_batch_mates() -> None:
    async with pool() as subject:
        first = subject.ask(text(10))
        await settle()
        bad, good, fine = subject.ask(text(10, fill=BAD_ID)), subject.ask(text(10, fill=2)), subject.ask(text(9))
        with capture_logs() as logs:
            results = await asyncio.gather(first, bad, good, fine, return_exceptions=True)
        assert isinstance(results[1], InternalError)
        assert [total(result) for result in results if isinstance(result, Answer)] == [10.0, 20.0, 9.0]
        assert subject.batches == [1, 3, 2, 1, 1, 1]
        assert [entry["event"] for entry in logs] == ["a batch failed; its members are tried in smaller ones"]


@on_virtual_time
async def test_a_bad_request_among_many_is_found_by_halving() -> None:
    async with pool() as subject:
        first = subject.ask(text(10))
        await settle()
        callers = [subject.ask(text(10, fill=BAD_ID if n == 5 else n)) for n in range(8)]
        with capture_logs() as logs:
            results = await asyncio.gather(first, *callers, return_exceptions=True)
        assert [type(result) for result in results] == [Answer] * 6 + [Poisonous] + [Answer] * 2
        assert subject.batches == [1, 8, 4, 4, 2, 2, 1, 1]
        assert len(logs) == 1


@on_virtual_time
async def test_who_comes_during_a_search_takes_no_part_in_it() -> None:
    async with pool() as subject:
        first = subject.ask(text(10))
        await settle()
        callers = [subject.ask(text(10, fill=BAD_ID)), subject.ask(text(10, fill=2))]
        await first
        await settle()
        callers += [subject.ask(text(10, fill=n), budget_s=1000.0) for n in (3, 4)]
        with capture_logs():
            results = await asyncio.gather(*callers, return_exceptions=True)
        assert [type(result) for result in results] == [Poisonous, Answer, Answer, Answer]
        assert subject.batches == [1, 2, 1, 1, 2]


@on_virtual_time
async def test_a_bad_request_by_itself_is_not_tried_twice() -> None:
    async with pool() as subject:
        with pytest.raises(InternalError, match="table"):
            await subject.ask(text(10, fill=BAD_ID))
        assert subject.batches == [1]


@on_virtual_time
async def test_a_wrong_number_of_results_answers_nobody_with_anothers() -> None:
    async with pool() as subject:

        async def drop_a_row(key: str, inputs: Any, patience_s: float) -> Computed:
            computed = await subject.worker.infer(key, inputs)
            return Computed({name: array[1:] for name, array in computed.outputs.items()}, computed.compute_s)

        subject.scheduler.detach(WORKER, "gone")
        subject.scheduler.attach("0.2", drop_a_row, restart_s=RESTART_S)
        results = await asyncio.gather(*[subject.ask(text(10)) for _ in range(3)], return_exceptions=True)
        assert [type(result) for result in results] == [Poisonous] * 3


@on_virtual_time
@pytest.mark.parametrize("where", ["padded", "patience_s"])
async def test_a_defect_in_forming_a_batch_is_told_to_those_who_had_left_the_queue(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> float:
        raise ZeroDivisionError

    async with pool() as subject:
        monkeypatch.setattr(f"cloud_pool.scheduler.{where}", fails)
        hit = subject.ask(text(10))
        with pytest.raises(InternalError, match="could not be formed"):
            await hit
        monkeypatch.undo()
        assert total(await subject.ask(text(10, fill=2))) == 20.0
        assert subject.scheduler.in_flight == 0


@on_virtual_time
async def test_a_defect_of_ours_fails_those_it_hits_and_not_the_queue() -> None:
    """An exception in a size or cost function hung Ray Serve's batcher for good (ray#66140)."""
    async with pool() as subject:
        subject.worker.fails.append(ZeroDivisionError("boom"))
        with capture_logs() as logs, pytest.raises(InternalError, match="ZeroDivisionError: boom"):
            await subject.ask(text(10))
        assert logs[0]["log_level"] == "error"
        assert total(await subject.ask(text(10))) == 10.0


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
        assert repr(subject.scheduler) == "<Scheduler <Seats 1 of 1 computing>, 2 waiting, 1 in flight>"
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
        other = Lane("other", TEXT, TEXT.variants[0], COST)
        subject.scheduler.open(other)
        await subject.worker.load(EngineSpec("other", "onnx", Path(__file__), ()))
        first = subject.ask(text(10))
        await settle()
        late = subject.ask(text(10, fill=2), budget_s=50.0)
        soon = subject.ask(text(10, fill=3), budget_s=5.0, key="other")
        await asyncio.gather(first, late, soon)
        assert [int(inputs["ids"][0, 0]) for inputs in subject.worker.begun] == [1, 3, 2]


class TestWithoutAWorker:
    @on_virtual_time
    async def test_a_batch_that_took_its_worker_down_is_tried_again_one_by_one(self) -> None:
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
    async def test_who_kills_two_workers_is_not_given_a_third(self) -> None:
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
    async def test_only_those_with_time_wait_for_the_next_worker(self) -> None:
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
            assert "<Seats none: " in repr(subject.scheduler)
            assert not patient.done()
            patient.cancel()

    @on_virtual_time
    async def test_who_waits_in_vain_for_a_worker_is_answered_in_time(self) -> None:
        async with pool() as subject:
            subject.scheduler.detach(WORKER, "gone")
            started_at = clock.now()
            with pytest.raises(DeadlineExceeded):
                await subject.ask(text(10), budget_s=10.0)
            assert clock.now() - started_at < 10.0

    @on_virtual_time
    async def test_a_lane_that_is_not_open_is_named(self) -> None:
        async with pool() as subject:
            with pytest.raises(Unreachable, match="nothing"):
                await subject.ask(text(10), key="nothing")


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


@on_virtual_time
async def test_predictions_follow_what_batches_really_take() -> None:
    async with pool() as subject:

        async def throttled(key: str, inputs: Any, patience_s: float) -> Computed:
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
async def test_a_partial_batch_is_held_back_for_company_if_the_manifest_says_so() -> None:
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
            if isinstance(result, Answer):
                assert total(result) == length * (number % 900 + 1)
            outcomes[type(result).__name__] = outcomes.get(type(result).__name__, 0) + 1

        await asyncio.gather(*[caller(number) for number in range(1000)])
        assert sum(outcomes.values()) == 1000
        assert set(outcomes) == {"Answer", "CancelledError", "DeadlineExceeded", "Overloaded"}
        assert subject.scheduler.queued == subject.scheduler.in_flight == len(subject.lane.batcher) == 0

"""Requests that fail their batch are found by halving and tried alone once, and harm no batch-mate."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from cloud_pool.scheduling.job import PoolResult
from tests.cloud_pool.workers_support import text
from tests.support.loop import on_virtual_time, settle
from tests.support.pool.fake_worker import BAD_ID
from tests.support.pool.lane_pool import RESTART_S, WORKER, pool, total
from tidegate.outcome import InternalError, Poisonous
from tidegate.workers.process import ComputeResult


@on_virtual_time
async def test_one_bad_request_does_not_fail_its_batch_mates() -> None:
    async with pool() as subject:
        first = subject.ask(text(10))
        await settle()
        bad, good, fine = subject.ask(text(10, fill=BAD_ID)), subject.ask(text(10, fill=2)), subject.ask(text(9))
        with capture_logs() as logs:
            results = await asyncio.gather(first, bad, good, fine, return_exceptions=True)
        assert isinstance(results[1], InternalError)
        assert [total(result) for result in results if isinstance(result, PoolResult)] == [10.0, 20.0, 9.0]
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
        assert [type(result) for result in results] == [PoolResult] * 6 + [Poisonous] + [PoolResult] * 2
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
        assert [type(result) for result in results] == [Poisonous, PoolResult, PoolResult, PoolResult]
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

        async def drop_a_row(key: str, inputs: Any, patience_s: float) -> ComputeResult:
            computed = await subject.worker.infer(key, inputs)
            return ComputeResult({name: array[1:] for name, array in computed.outputs.items()}, computed.compute_s)

        subject.scheduler.detach(WORKER, "gone")
        subject.scheduler.attach("0.2", drop_a_row, restart_s=RESTART_S)
        results = await asyncio.gather(*[subject.ask(text(10)) for _ in range(3)], return_exceptions=True)
        assert [type(result) for result in results] == [Poisonous] * 3


@pytest.mark.slow
@on_virtual_time
@pytest.mark.parametrize("where", ["padded_shape", "batch_patience_s"])
async def test_a_defect_in_forming_a_batch_is_told_to_those_who_had_left_the_queue(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> float:
        raise ZeroDivisionError

    async with pool() as subject:
        monkeypatch.setattr(f"cloud_pool.scheduling.scheduler.{where}", fails)
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
async def test_a_request_whose_parts_cannot_be_joined_fails_alone() -> None:
    async with pool() as subject:

        async def as_long_as_the_largest_id(key: str, inputs: Any, patience_s: float) -> ComputeResult:
            ids = inputs["ids"]
            return ComputeResult({"sum": np.zeros((len(ids), int(ids.max())), np.float32), "twice": ids * 2}, 0.1)

        subject.scheduler.detach(WORKER, "it makes way")
        subject.scheduler.attach("data-dependent", as_long_as_the_largest_id, restart_s=RESTART_S)
        large = {name: np.repeat(array, 12, axis=0) for name, array in text(4).items()}
        large["ids"][0] = 5  # the first part's output is longer than the second's
        asked = [subject.ask(large), *[subject.ask(text(4, fill=2)) for _ in range(3)]]
        first, *mates = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(first, InternalError)
        assert "'sum' of its parts cannot be joined" in first.message and "no more than 8 rows at once" in first.message
        assert [type(mate) for mate in mates] == [PoolResult] * 3
        assert [mate.batch_rows for mate in mates if isinstance(mate, PoolResult)] == [7, 7, 7]

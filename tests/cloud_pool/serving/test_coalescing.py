"""Callers with the same input who are there at the same time: one place for all, an answer for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from cloud_pool.scheduling.job import PoolRequest, PoolResult
from cloud_pool.serving.coalescing import Coalescer
from tests.cloud_pool.models import manifest_of
from tests.cloud_pool.workers_support import Arrays, text
from tests.support.loop import on_virtual_time, settle
from tests.support.pool.fake_worker import BAD_ID
from tests.support.pool.lane_pool import KEY, Pool, pool, total
from tidegate import clock
from tidegate.models.manifest import Batching
from tidegate.outcome import DeadlineExceeded, InternalError, Overloaded
from tidegate.types import Accepted


class Twins:
    def __init__(self, subject: Pool) -> None:
        self.pool = subject
        self.coalescer = Coalescer(subject.scheduler.submit)

    def ask(self, arrays: Arrays, *, budget_s: float = 20.0, **more: Any) -> asyncio.Task[PoolResult]:
        now = clock.now()
        ask = PoolRequest(arrays, float(arrays["ids"].size), now, now + budget_s, **more)
        return asyncio.create_task(self.coalescer.submit(KEY, ask))


@asynccontextmanager
async def busy(**batching: Any) -> AsyncIterator[Twins]:
    """A pool whose worker computes for the next second."""
    manifest = manifest_of(batching=Batching(**{"max_batch_size": 8, "pad_axis": "sequence", **batching}))
    async with pool(manifest) as inner:
        subject = Twins(inner)
        first = inner.ask(text(90))
        await settle()
        yield subject
        await first
        await settle()
        assert repr(subject.coalescer).startswith("<Coalescer 0 inputs")
        assert inner.scheduler.queued == inner.scheduler.in_flight == 0


@on_virtual_time
async def test_equal_inputs_are_computed_once_and_each_caller_is_answered() -> None:
    async with busy() as subject:
        callers = [subject.ask(text(10, fill=3)) for _ in range(4)]
        await settle()
        assert subject.pool.scheduler.queued == 1
        other = subject.ask(text(10, fill=4))
        answers = await asyncio.gather(*callers, other)
        assert [total(answer) for answer in answers] == [30.0, 30.0, 30.0, 30.0, 40.0]
        assert subject.pool.batches == [1, 2]
        assert subject.coalescer.spared == 3


@on_virtual_time
async def test_who_leaves_touches_no_other() -> None:
    async with busy() as subject:
        callers = [subject.ask(text(10, fill=3)) for _ in range(3)]
        await settle()
        for leaving in callers[:2]:  # the one that took the place is the first
            leaving.cancel()
        assert total(await callers[2]) == 30.0


@on_virtual_time
async def test_when_all_have_left_their_place_is_free() -> None:
    async with busy() as subject:
        callers = [subject.ask(text(10, fill=3)) for _ in range(3)]
        await settle()
        for leaving in callers:
            leaving.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await settle()
        assert subject.pool.scheduler.queued == 0
    assert subject.pool.batches == [1]


@on_virtual_time
async def test_who_is_more_urgent_goes_ahead_and_takes_its_twin_along() -> None:
    async with busy(max_batch_size=1) as subject:
        patient = subject.ask(text(10, fill=3), budget_s=19.0)
        others = [subject.ask(text(10, fill=n), budget_s=10.0) for n in (5, 6)]
        await settle()
        urgent = subject.ask(text(10, fill=3), budget_s=5.0)
        done, _ = await asyncio.wait([patient, urgent, *others], return_when=asyncio.FIRST_COMPLETED)
        assert patient in done
        assert urgent in done
        await asyncio.gather(*others)
        assert subject.pool.batches == [1, 1, 1, 1]


@on_virtual_time
async def test_who_has_more_time_is_not_late_with_its_twin() -> None:
    async with busy() as subject:
        hurried = subject.ask(text(10, fill=3), budget_s=0.5)
        patient = subject.ask(text(10, fill=3))
        with pytest.raises(DeadlineExceeded):
            await hurried
        answer = await patient
        assert total(answer) == 30.0
        assert answer.queue_s == pytest.approx(1.0)


@on_virtual_time
async def test_waits_are_each_callers_own() -> None:
    async with busy() as subject:
        early = subject.ask(text(10, fill=3))
        await clock.sleep(0.4)
        late = subject.ask(text(10, fill=3))
        await settle()
        assert [(await one).queue_s for one in (early, late)] == pytest.approx([1.0, 0.6])


@on_virtual_time
async def test_a_bad_input_fails_for_all_who_sent_it() -> None:
    async with busy() as subject:
        callers = [subject.ask(text(10, fill=BAD_ID)) for _ in range(2)]
        for caller in callers:
            with pytest.raises(InternalError):
                await caller


@on_virtual_time
async def test_a_full_queue_refuses_who_needs_a_place_and_not_who_does_not() -> None:
    async with busy(max_queue_size=1) as subject:
        first = subject.ask(text(10, fill=3))
        await settle()
        with pytest.raises(Overloaded):
            await subject.ask(text(10, fill=4))
        assert total(await subject.ask(text(10, fill=3))) == 30.0
        await first


@on_virtual_time
async def test_a_more_urgent_twin_without_room_has_the_others_answer() -> None:
    async with busy(max_queue_size=1) as subject:
        first = subject.ask(text(10, fill=3))
        await settle()
        assert total(await subject.ask(text(10, fill=3), budget_s=5.0)) == 30.0
        await first


@on_virtual_time
async def test_everybody_hears_that_it_was_accepted() -> None:
    async with busy() as subject:
        heard: list[Accepted] = []
        first = subject.ask(text(10, fill=3), on_accepted=heard.append)
        await settle()
        second = subject.ask(text(10, fill=3), on_accepted=heard.append)
        third = subject.ask(text(10, fill=3), on_accepted=heard.append, budget_s=5.0)
        await settle()
        assert len(heard) == 3
        await asyncio.gather(first, second, third)


@on_virtual_time
async def test_a_pool_that_closes_answers_all_of_them() -> None:
    async with pool() as inner:
        subject = Twins(inner)
        callers = [subject.ask(text(10, fill=3)) for _ in range(3)]
        await settle()
        inner.scheduler.close()
        done = await asyncio.gather(*callers, return_exceptions=True)
        assert [type(one).__name__ for one in done] == ["Unreachable"] * 3


@on_virtual_time
async def test_a_later_request_is_computed_again() -> None:
    async with busy() as subject:
        await subject.ask(text(10, fill=3))
        await subject.ask(text(10, fill=3))
        assert subject.pool.batches == [1, 1, 1]


@pytest.mark.slow
@on_virtual_time
async def test_a_thousand_callers_with_few_inputs_who_come_and_leave_as_they_like_are_each_answered_once() -> None:
    draw = Random(5)
    async with busy() as subject:
        callers = list[asyncio.Task[PoolResult]]()
        for number in range(1_000):
            callers.append(subject.ask(text(10, fill=2 + number % 7), budget_s=draw.choice([0.3, 2.0, 8.0, 60.0])))
            if draw.random() < 0.3:
                draw.choice(callers).cancel()
            if draw.random() < 0.2:
                await clock.sleep(draw.expovariate(20.0))
        done = await asyncio.gather(*callers, return_exceptions=True)
        answers = [(number, one) for number, one in enumerate(done) if isinstance(one, PoolResult)]
        assert all(total(answer) == 10.0 * (2 + number % 7) for number, answer in answers)
        assert len(answers) > 400
        assert {type(one) for one in done if isinstance(one, BaseException)} <= {
            DeadlineExceeded, asyncio.CancelledError,
        }  # fmt: skip
        assert sum(subject.pool.batches) < 500

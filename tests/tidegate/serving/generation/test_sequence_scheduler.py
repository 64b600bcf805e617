"""The sequence scheduler lets generations begin and end, whoever leaves and whenever: on virtual time."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from tests.support.loop import on_virtual_time, settle
from tidegate import clock
from tidegate.outcome import DeadlineExceeded, Overloaded, ServeError, Unreachable
from tidegate.serving.generation.sequence_queue import SequenceQueue
from tidegate.serving.generation.sequence_scheduler import SequenceNeed, SequenceResult, SequenceScheduler
from tidegate.types import Accepted

START_S = 1000.0  # of virtual time


def scheduler_of(slots: int = 1, *, max_size: int = 8) -> SequenceScheduler:
    scheduler = SequenceScheduler(SequenceQueue(max_size=max_size))
    scheduler.open("w", slots=slots)
    return scheduler


def run(
    scheduler: SequenceScheduler, takes_s: float = 1.0, *, within_s: float = 60.0, certain_s: float = 0.0, **more: Any
) -> asyncio.Task[SequenceResult[str]]:
    """A generation that takes so long, and gives the name of its place."""

    async def work(place: str) -> str:
        await clock.sleep(takes_s)
        return place

    need = SequenceNeed(clock.now() + within_s, certain_s, takes_s, takes_s, 0)
    return asyncio.create_task(scheduler.run(need, work, unavailable=lambda: "there is no worker", **more))


def state(scheduler: SequenceScheduler) -> tuple[int, int]:
    return scheduler.queued, scheduler.in_flight


@on_virtual_time
async def test_who_waits_begins_when_a_slot_is_free_and_hears_what_is_ahead() -> None:
    scheduler, heard = scheduler_of(), list[Accepted]()
    first = run(scheduler, 2.0)
    await settle()
    second = run(scheduler, 1.0, on_accepted=heard.append)

    assert (await first, await second) == (SequenceResult("w", 0.0, 2.0), SequenceResult("w", 2.0, 1.0))
    assert heard == [Accepted(1, pytest.approx(3.0))]
    assert state(scheduler) == (0, 0)
    await scheduler.drained()


@on_virtual_time
async def test_who_leaves_frees_its_place_wherever_it_is() -> None:
    scheduler = scheduler_of()
    running, leaving, staying = (run(scheduler) for _ in range(3))
    await settle()
    assert state(scheduler) == (2, 1)

    leaving.cancel()
    await settle()
    assert state(scheduler) == (1, 1)
    running.cancel()
    await settle()
    assert state(scheduler) == (0, 1)
    assert (await staying).queue_s == 0.0
    for one in (running, leaving):
        with pytest.raises(asyncio.CancelledError):
            await one


@on_virtual_time
async def test_one_that_is_cancelled_in_the_moment_of_its_turn_leaves_no_slot_taken() -> None:
    scheduler = scheduler_of()
    running, waiting, last = run(scheduler), run(scheduler), run(scheduler)
    await settle()

    running.cancel()  # its end hands the slot on ...
    await clock.sleep(0)
    waiting.cancel()  # ... to one that is not there any more

    assert (await last).result == "w"
    await settle()
    assert state(scheduler) == (0, 0)


@on_virtual_time
async def test_a_deadline_ends_one_that_runs_and_one_that_waits() -> None:
    scheduler = scheduler_of()
    running = run(scheduler, 10.0, within_s=4.0)
    await settle()
    waiting = run(scheduler, 1.0, within_s=3.0, certain_s=1.0)

    with pytest.raises(DeadlineExceeded, match="all slots are taken"):
        await waiting
    assert clock.now() == pytest.approx(START_S + 3.0 - 0.6)
    with pytest.raises(DeadlineExceeded, match="while it was generated"):
        await running
    assert clock.now() == pytest.approx(START_S + 4.0) and state(scheduler) == (0, 0)


@on_virtual_time
async def test_without_a_place_nobody_waits() -> None:
    scheduler = scheduler_of()
    running, waiting = run(scheduler), run(scheduler)
    await settle()

    scheduler.close("w", "the worker was killed")
    with pytest.raises(Unreachable, match="the worker was killed"):
        await waiting
    with pytest.raises(Unreachable, match="there is no worker"):
        await run(scheduler)
    assert (await running).result == "w"  # its own work says what became of it
    assert state(scheduler) == (0, 0)


@on_virtual_time
async def test_a_place_retires_once_what_has_begun_there_is_over_and_its_successor_takes_the_others() -> None:
    scheduler = scheduler_of()
    first, second = run(scheduler, 5.0), run(scheduler, 1.0)
    await settle()
    scheduler.open("successor", slots=1)
    await settle()

    await scheduler.retire("w")
    assert clock.now() == pytest.approx(START_S + 5.0) and first.done()
    scheduler.close("w", "recycled")
    assert (await second).result == "successor"
    await scheduler.retire("unknown")


@on_virtual_time
async def test_an_error_of_the_work_is_its_callers_and_frees_the_slot() -> None:
    scheduler = scheduler_of()

    async def fails(_place: str) -> str:
        raise TimeoutError("its own")

    need = SequenceNeed(clock.now() + 5.0, 0.0, 1.0, 1.0, 0)
    with pytest.raises(TimeoutError, match="its own"):
        await scheduler.run(need, fails, unavailable=lambda: "")
    assert state(scheduler) == (0, 0)


@on_virtual_time
@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_left_of_a_crowd_that_comes_and_goes_by_chance(seed: int) -> None:
    scheduler, chance = scheduler_of(2, max_size=6), Random(seed)
    callers: list[asyncio.Task[Any]] = []
    most = 0
    for number in range(200):
        times = {"within_s": chance.uniform(0.0, 2.0), "certain_s": chance.uniform(0.0, 0.3)}
        callers.append(run(scheduler, chance.uniform(0.0, 0.5), **times))
        if chance.random() < 0.3:
            chance.choice(callers).cancel()
        if number == 100:
            scheduler.close("w", "killed")
            scheduler.open("v", slots=2)
        await clock.sleep(chance.choice([0.0, 0.0, 0.05, 0.3]))
        most = max(most, scheduler.in_flight)
        assert scheduler.in_flight <= 2 and scheduler.queued <= 6

    ends = await asyncio.gather(*callers, return_exceptions=True)
    known = (SequenceResult, DeadlineExceeded, Overloaded, Unreachable, asyncio.CancelledError)
    assert all(isinstance(end, known) for end in ends), ends
    assert most == 2 and sum(isinstance(end, SequenceResult) for end in ends) > 20
    assert not any(isinstance(end, ServeError) and not end.message for end in ends)
    assert state(scheduler) == (0, 0)
    await scheduler.drained()

"""What callers of a busy edge hear, and when: on virtual time, with work that takes exactly what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from edge_agent.core.edge_queue import OPTIMISM, EdgeQueue
from edge_agent.serving.scheduler import EdgeScheduler, WorkResult
from tests.support.loop import elapsed, on_virtual_time, settle
from tidegate import clock
from tidegate.outcome import DeadlineExceeded, InternalError, Overloaded, Unreachable
from tidegate.types import Accepted


class Device:
    """Work that sleeps; remembers in which order it began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []

    def work(self, name: str, seconds: float) -> Callable[[], Awaitable[str]]:
        async def compute() -> str:
            self.began.append(name)
            await clock.sleep(seconds)
            self.ended.append(name)
            return f"answer to {name}"

        return compute


@asynccontextmanager
async def edge(max_size: int = 8, slots: int = 1) -> AsyncIterator[tuple[EdgeScheduler, Device]]:
    async with EdgeScheduler(EdgeQueue(max_size=max_size, slots=slots)) as scheduler:
        yield scheduler, Device()


def submit(
    scheduler: EdgeScheduler,
    device: Device,
    name: str,
    *,
    takes_s: float = 1.0,
    budget_s: float = 100.0,
    lane: str = "m",
) -> asyncio.Task[WorkResult[str]]:
    """A caller in a task of its own, whose work was priced right."""
    call = scheduler.run(device.work(name, takes_s), lane=lane, deadline=clock.now() + budget_s, cost_s=takes_s)
    return asyncio.create_task(call, name=name)


@on_virtual_time
async def test_an_idle_edge_computes_at_once_and_tells_how_long_each_part_took() -> None:
    async with edge() as (scheduler, device):
        done, took_s = await elapsed(submit(scheduler, device, "a", takes_s=0.5))

        assert done == WorkResult("answer to a", queue_s=0.0, compute_s=pytest.approx(0.5))
        assert took_s == pytest.approx(0.5)


@on_virtual_time
async def test_those_that_wait_are_computed_by_deadline_one_at_a_time() -> None:
    async with edge() as (scheduler, device):
        calls = [submit(scheduler, device, "first")]
        await settle()
        calls += [submit(scheduler, device, name, budget_s=budget_s) for name, budget_s in (("late", 50), ("soon", 9))]

        last = (await asyncio.gather(*calls))[1]

        assert device.began == ["first", "soon", "late"]
        assert last.queue_s == pytest.approx(2.0)


@on_virtual_time
async def test_a_caller_hears_of_its_place_before_its_answer() -> None:
    async with edge() as (scheduler, device):
        heard: list[Accepted | str] = []
        first = submit(scheduler, device, "first", takes_s=2.0)
        await settle()

        done = await scheduler.run(
            device.work("second", 1.0),
            lane="m",
            deadline=clock.now() + 9.0,
            cost_s=1.0,
            on_accepted=heard.append,
        )
        heard.append(done.result)

        assert heard == [Accepted(queue_ahead=1, finish_in_s=pytest.approx(3.0)), "answer to second"]
        await first


@on_virtual_time
async def test_a_full_queue_refuses_at_once() -> None:
    async with edge(max_size=1) as (scheduler, device):
        calls = [submit(scheduler, device, "computing")]
        await settle()
        calls.append(submit(scheduler, device, "waiting"))
        await settle()

        with pytest.raises(Overloaded) as refused:
            await submit(scheduler, device, "refused")

        assert refused.value.retry_after_s == pytest.approx(2.0)
        await asyncio.gather(*calls)


@on_virtual_time
async def test_a_cancelled_caller_frees_its_place_in_the_same_moment() -> None:
    async with edge(max_size=1) as (scheduler, device):
        first = submit(scheduler, device, "first")
        await settle()
        gone = submit(scheduler, device, "gone")
        await settle()

        gone.cancel()
        await settle()
        third = submit(scheduler, device, "third")
        await asyncio.gather(first, third)

        assert device.began == ["first", "third"]
        assert gone.cancelled()


@on_virtual_time
async def test_a_computation_whose_caller_left_keeps_its_slot_until_it_ends() -> None:
    async with edge() as (scheduler, device):
        gone = submit(scheduler, device, "gone", takes_s=5.0)
        await settle()
        gone.cancel()

        _, took_s = await elapsed(submit(scheduler, device, "next", takes_s=1.0))

        assert device.ended == ["gone", "next"]
        assert took_s == pytest.approx(6.0)


@on_virtual_time
async def test_one_that_can_not_make_it_any_more_hears_it_by_a_timer_while_the_slot_is_still_taken() -> None:
    async with edge() as (scheduler, device):
        # Priced at 1 s but takes 60: what waits behind it was admitted in good faith.
        overrun = asyncio.create_task(
            scheduler.run(device.work("overrun", 60.0), lane="m", deadline=clock.now() + 100.0, cost_s=1.0)
        )
        await settle()
        started_at = clock.now()

        with pytest.raises(DeadlineExceeded, match="waiting 4400 ms"):
            await submit(scheduler, device, "waiting", takes_s=1.0, budget_s=5.0)

        assert clock.now() - started_at == pytest.approx(5.0 - OPTIMISM * 1.0)
        await overrun
        assert device.began == ["overrun"]


@on_virtual_time
async def test_one_that_computes_beyond_its_deadline_is_answered_at_its_deadline() -> None:
    async with edge() as (scheduler, device):
        started_at = clock.now()

        with pytest.raises(DeadlineExceeded, match="while it was being computed"):
            await scheduler.run(device.work("slow", 60.0), lane="m", deadline=started_at + 2.0, cost_s=1.0)

        assert clock.now() - started_at == pytest.approx(2.0)
        await submit(scheduler, device, "next")
        assert clock.now() - started_at == pytest.approx(61.0)


@on_virtual_time
async def test_an_error_of_the_work_is_its_callers_answer_and_the_next_is_computed() -> None:
    async def fails() -> str:
        raise InternalError("the engine refused")

    async with edge() as (scheduler, device):
        with pytest.raises(InternalError, match="the engine refused"):
            await scheduler.run(fails, lane="m", deadline=clock.now() + 9.0, cost_s=1.0)

        assert (await submit(scheduler, device, "next")).result == "answer to next"


@on_virtual_time
async def test_a_dead_workers_queue_is_refused_at_once_and_other_models_go_on() -> None:
    async with edge() as (scheduler, device):
        computing = submit(scheduler, device, "computing", lane="digits")
        await settle()
        waiting = [submit(scheduler, device, name, lane="minilm") for name in ("one", "two")]
        other = submit(scheduler, device, "other", lane="digits")
        await settle()

        scheduler.close("minilm", "minilm's worker is gone")
        outcomes, took_s = await elapsed(asyncio.gather(*waiting, return_exceptions=True))

        assert took_s == 0.0
        assert [type(outcome) for outcome in outcomes] == [Unreachable, Unreachable]
        await asyncio.gather(computing, other)
        assert device.began == ["computing", "other"]


@on_virtual_time
async def test_two_slots_compute_two_models_together() -> None:
    async with edge(slots=2) as (scheduler, device):
        calls = [submit(scheduler, device, lane, lane=lane) for lane in ("minilm", "digits")]

        _, took_s = await elapsed(asyncio.gather(*calls))

        assert took_s == pytest.approx(1.0)


@on_virtual_time
async def test_a_shutdown_answers_everybody() -> None:
    async with edge() as (scheduler, device):
        calls = [submit(scheduler, device, name, takes_s=60.0) for name in ("computing", "waiting")]
        await settle()

    outcomes, took_s = await elapsed(asyncio.gather(*calls, return_exceptions=True))

    assert took_s == 0.0
    assert [type(outcome) for outcome in outcomes] == [Unreachable, Unreachable]
    assert scheduler.queued == scheduler.in_flight == 0
    with pytest.raises(Unreachable, match="is shutting down"):
        await submit(scheduler, device, "later")


@on_virtual_time
async def test_draining_ends_when_nobody_waits_any_more() -> None:
    async with edge() as (scheduler, device):
        calls = [submit(scheduler, device, name) for name in ("a", "b", "c")]
        await settle()

        _, took_s = await elapsed(scheduler.drained())

        assert took_s == pytest.approx(3.0)
        await asyncio.gather(*calls)


@on_virtual_time
async def test_the_queue_delay_is_what_a_newcomer_would_wait() -> None:
    async with edge() as (scheduler, device):
        calls = [submit(scheduler, device, name, takes_s=2.0) for name in ("a", "b")]
        await settle()
        await clock.sleep(0.5)

        assert scheduler.queue_delay_s(clock.now()) == pytest.approx(3.5)
        assert repr(scheduler) == "<EdgeScheduler <EdgeQueue 1/8 waiting, 1/1 computing>>"
        await asyncio.gather(*calls)


@on_virtual_time
async def test_a_defect_that_nobody_waits_for_is_logged_and_not_lost() -> None:
    async def breaks() -> str:
        await clock.sleep(5.0)
        raise ZeroDivisionError

    async with edge() as (scheduler, _):
        with capture_logs() as logs, pytest.raises(DeadlineExceeded):
            await scheduler.run(breaks, lane="m", deadline=clock.now() + 1.0, cost_s=1.0)
        with capture_logs() as logs:
            await clock.sleep(5.0)

        assert [entry["event"] for entry in logs] == ["work failed that nobody waits for any more"]


@on_virtual_time
async def test_the_fleet_is_told_when_the_queue_moves_by_more_than_a_few() -> None:
    told: list[int] = []
    scheduler = EdgeScheduler(EdgeQueue(max_size=8), on_moved=lambda: told.append(scheduler.queued))
    async with scheduler:
        calls = [submit(scheduler, Device(), str(number)) for number in range(6)]
        await asyncio.gather(*calls)

    assert told == [4, 0]

"""A loop that is held up, and a garbage collection, are seen in the metrics."""

from __future__ import annotations

import gc

import pytest

from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.metrics.exposition import Exposition
from tidegate.metrics.loop_families import loop_families
from tidegate.metrics.loop_lag import EVERY_S, STALL_S, LoopLag


@on_virtual_time
async def test_an_idle_loop_is_not_late() -> None:
    async with LoopLag() as subject:
        await clock.sleep(10.1 * EVERY_S)
    assert subject.lag.count == 10
    assert (subject.lag.total, subject.stalls) == (0.0, 0)


@pytest.mark.slow
async def test_what_blocks_the_loop_is_lag_and_a_stall() -> None:
    async with LoopLag() as subject:
        await clock.sleep(0.0)  # the timer is armed
        clock.block_until(clock.now() + EVERY_S + 1.2 * STALL_S)
        while not subject.lag.count:
            await clock.sleep(0.001)
    assert subject.stalls == 1
    assert subject.lag.total >= STALL_S


@pytest.mark.slow
async def test_a_deadline_that_a_stall_cost_is_a_condition_and_a_stall_alone_is_none() -> None:
    async with LoopLag() as subject:
        for costs in (False, True):
            await clock.sleep(0.0)
            began_at = clock.now()
            clock.block_until(began_at + EVERY_S + 1.2 * STALL_S)
            if costs:
                subject.cost.missed(began_at, clock.now())  # before the loop gets to know that it was late
            while subject.stalls < 1 + costs:
                await clock.sleep(0.001)
            assert ("1 deadline was missed by it" in subject.cost.evidence) == costs


async def test_collections_are_timed_by_generation_and_only_while_it_runs() -> None:
    async with LoopLag() as subject:
        gc.collect(2)
        gc.collect(0)
    seen = {generation: pauses.count for generation, pauses in subject.pauses.items()}
    assert seen[2] >= 1 and seen[0] >= 1
    gc.collect(2)
    assert {generation: pauses.count for generation, pauses in subject.pauses.items()} == seen


async def test_the_families_are_exposed() -> None:
    subject = LoopLag()
    text = Exposition(lambda: loop_families(subject)).render()[0].decode()
    for name in ("tidegate_loop_lag_seconds_count 0.0", "tidegate_loop_stalls_total 0.0", 'generation="2"'):
        assert name in text

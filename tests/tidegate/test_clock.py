"""Specification of the clock: where a process sleeps, and what a worker need not have in memory for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from itertools import pairwise

import pytest

from tests.support.loop import on_virtual_time
from tidegate import clock


@on_virtual_time
async def test_what_looks_once_a_second_wakes_its_process_at_one_instant() -> None:
    woken: list[float] = []

    async def look(begins_after_s: float) -> None:
        await clock.sleep(begins_after_s)
        for _ in range(3):
            await clock.sleep_until_tick(1.0)
            woken.append(clock.now())

    await asyncio.gather(look(0.3), look(0.6))

    instants = sorted({round(at, 6) for at in woken})
    assert len(instants) == 3
    assert [later - earlier for earlier, later in pairwise(instants)] == pytest.approx([1, 1])


@on_virtual_time
async def test_a_timer_that_rings_a_moment_early_is_not_rung_again_for_the_same_tick() -> None:
    await clock.sleep_until_tick(1.0)
    ticked_at = clock.now()
    await clock.sleep(0.9995)  # as a loop does that counts milliseconds

    await clock.sleep_until_tick(1.0)

    assert clock.now() - ticked_at == pytest.approx(2.0)


@pytest.mark.slow
def test_a_worker_process_reads_the_clock_without_an_event_loop_in_memory() -> None:
    program = "import sys, tidegate.workers.child; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False, timeout=60).returncode == 0

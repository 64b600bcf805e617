"""The virtual-time loop: hours at once, the same order each time, no silent hangs."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.loop import Deadlock, elapsed, on_virtual_time, run
from tidegate import clock


def test_an_hour_passes_at_once() -> None:
    started = time.perf_counter()

    _, virtual_s = run(elapsed(clock.sleep(3600.0)))

    assert virtual_s == pytest.approx(3600.0)
    assert time.perf_counter() - started < 60.0


def test_the_clock_reads_virtual_time_only_while_the_loop_runs() -> None:
    async def read() -> float:
        return clock.now()

    before = clock.now()
    assert run(read(), start_s=5.0) == 5.0
    assert clock.now() >= before


@on_virtual_time
async def test_timers_fire_in_the_order_of_their_instants() -> None:
    order: list[str] = []
    loop = asyncio.get_running_loop()
    for name, delay_s in (("third", 30.0), ("first", 0.001), ("second", 29.9)):
        loop.call_later(delay_s, order.append, name)

    await clock.sleep(31.0)

    assert order == ["first", "second", "third"]


@pytest.mark.slow
def test_a_wait_that_nothing_will_end_is_an_error_and_not_a_hang() -> None:
    async def wait_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run(wait_for_ever())


def test_a_thread_that_comes_back_is_waited_for_in_real_time() -> None:
    async def ask_a_thread() -> int:
        return await asyncio.to_thread(lambda: 7)

    assert run(ask_a_thread()) == 7

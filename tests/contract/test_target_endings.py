"""How a call to any `Target` ends before its answer: cancelled, out of time, its server dead or never there."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.gateway.targets import AT_ONCE_S, GROWING_S, Bench, Server, target_of
from tidegate import clock
from tidegate.outcome import DeadlineExceeded, Unreachable

pytestmark = pytest.mark.slow


async def test_cancelling_reaches_the_far_side(bench: Bench) -> None:
    bench.server.host.gate.clear()
    asking = asyncio.create_task(bench.ask())
    await bench.server.host.begun.acquire()

    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(30):
        await bench.server.host.left.acquire()
    assert bench.server.host.cancelled == 1


async def test_a_budget_that_runs_out_ends_the_call_here_and_there(bench: Bench) -> None:
    bench.server.host.gate.clear()
    for budget_s in GROWING_S:
        asked_at = clock.now()
        with pytest.raises(DeadlineExceeded):
            await bench.ask(budget_s=budget_s)
        assert budget_s - 0.05 < clock.now() - asked_at < budget_s + AT_ONCE_S
        if bench.server.host.calls:
            break

    async with asyncio.timeout(30):
        await bench.server.host.left.acquire()
    assert bench.server.host.cancelled >= 1


async def test_without_a_budget_nothing_is_asked(bench: Bench) -> None:
    with pytest.raises(DeadlineExceeded):
        await bench.ask(budget_s=-1.0)

    assert bench.server.host.calls == []


async def test_a_server_that_dies_under_a_request_is_noticed_at_once(bench: Bench) -> None:
    bench.server.host.gate.clear()
    asking = [asyncio.create_task(bench.ask(budget_s=60.0)) for _ in range(3)]
    for _ in asking:
        await bench.server.host.begun.acquire()
    killed_at = clock.now()

    await bench.server.kill()

    for task in asking:
        with pytest.raises(Unreachable):
            await task
    assert clock.now() - killed_at < AT_ONCE_S


async def test_a_dead_server_is_unreachable_at_once_and_used_again_when_it_is_back(bench: Bench) -> None:
    await bench.server.kill()
    await bench.until(lambda: bench.downs() == 1)
    asked_at = clock.now()
    with pytest.raises(Unreachable):
        await bench.ask(budget_s=60.0)
    assert clock.now() - asked_at < AT_ONCE_S

    await bench.server.start()
    await bench.until(lambda: bench.ups() == 2)

    await bench.ask()
    assert bench.downs() == 1, "told once per change"


@pytest.mark.parametrize("kind", ["link", "unary"])
async def test_a_server_that_was_never_there_is_told_as_down_once(kind: str, unused_tcp_port: int) -> None:
    bench = Bench(kind, Server(), None)  # type: ignore[arg-type]
    async with target_of(kind, f"127.0.0.1:{unused_tcp_port}", bench.tell) as target:
        bench.target = target
        await bench.until(lambda: bench.downs() == 1)

        with pytest.raises(Unreachable):
            await bench.ask()
        assert (bench.ups(), bench.downs()) == (0, 1)

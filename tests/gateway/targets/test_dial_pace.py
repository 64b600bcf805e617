"""The pace of dials: at once for a few, bounded for very many, and first for those of which the fleet hears again."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from gateway.core.fleet.link_events import LinkDown, RedialFailed
from gateway.targets import dial_pace
from gateway.targets.dial_pace import AGAIN_BURST, FIRST_BURST, DialPace
from gateway.targets.link import LinkTarget
from tidegate import clock
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.testing.ports import free_port


@pytest.fixture
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_pace, "FIRST_PER_S", 20.0)
    monkeypatch.setattr(dial_pace, "AGAIN_PER_S", 10.0)


async def _dialled(pace: DialPace, name: str, into: list[str], *, again: bool) -> None:
    await pace.turn(name, again=again)
    into.append(name)


async def test_a_few_dials_wait_for_nothing() -> None:
    pace = DialPace()
    async with asyncio.timeout(0.1):
        for number in range(int(FIRST_BURST)):
            await pace.turn(str(number), again=False)
        for number in range(int(AGAIN_BURST)):
            await pace.turn(str(number), again=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_slow")
async def test_very_many_take_turns_and_one_that_is_heard_of_again_goes_first() -> None:
    pace, done = DialPace(), list[str]()
    for number in range(int(AGAIN_BURST)):
        await pace.turn(str(number), again=True)
    began_at = clock.now()
    tasks = [asyncio.create_task(_dialled(pace, f"far-{number}", done, again=True)) for number in range(6)]
    await clock.sleep(0.0)
    await cancel_and_wait(tasks[0])  # it holds up nobody
    pace.hurry("far-5")
    pace.hurry("nobody")
    await asyncio.gather(*tasks[1:])
    assert done == ["far-5", "far-1", "far-2", "far-3", "far-4"]
    assert clock.now() - began_at > 3.0 / 10.0
    async with asyncio.timeout(0.1):
        await pace.turn("new", again=False)


@pytest.mark.slow
@pytest.mark.usefixtures("_slow")
async def test_hundreds_of_addresses_that_nobody_can_reach_are_dialled_no_oftener_than_a_few() -> None:
    """Each was dialled every two seconds on average, for 4 ms of the gateway's core."""
    pace, numbers, vain = DialPace(), count(), list[LinkDown | RedialFailed]()
    address = f"127.0.0.1:{free_port()}"
    targets = [
        LinkTarget(
            f"edge/{next(numbers)}",
            address,
            gateway_name="g",
            on_event=lambda event: vain.append(event) if isinstance(event, LinkDown | RedialFailed) else None,
            draw=lambda: 0.5,
            pace=pace,
        )
        for _ in range(120)
    ]
    began_at = clock.now()
    for target in targets:
        await target.__aenter__()
    try:
        await clock.sleep(4.0)
        passed_s = clock.now() - began_at
        assert len(vain) <= FIRST_BURST + AGAIN_BURST + 30.0 * passed_s + 1.0
        assert sum(isinstance(event, LinkDown) for event in vain) > FIRST_BURST, "those that wait come to their turn"
        first = targets[0]
        first.hurry()
        async with asyncio.timeout(3.0):
            while not any(isinstance(event, RedialFailed) and event.target_id == "edge/0" for event in vain):
                await clock.sleep(0.01)
    finally:
        await asyncio.gather(*(target.__aexit__() for target in targets))

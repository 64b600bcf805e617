"""The sequence watchdog gives up a worker that is silent for longer than its steps explain: on virtual time."""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from tests.support.loop import on_virtual_time, settle
from tidegate import clock
from tidegate.outcome import Unreachable
from tidegate.workers.generation.sequence_watchdog import SequenceWatchdog


class Silent:
    """A worker that has been silent since an instant."""

    def __init__(self, patience_s: float = 1.0) -> None:
        self.since: float | None = clock.now()
        self.sequence_patience_s = patience_s

    @property
    def silent_s(self) -> float:
        return 0.0 if self.since is None else clock.now() - self.since


class Watched:
    def __init__(self, worker: Silent, *, limit_s: float = 30.0, to_limit: bool = False) -> None:
        self.excused_s = 0.0
        self.excused_always = False
        self.hung: list[float] = []
        self.worker = worker
        self.dog = SequenceWatchdog(
            worker,
            limit_s=limit_s,
            excused_s=lambda: clock.now() if self.excused_always else self.excused_s,
            on_hung=self.hung.append,
            excused_to_limit=to_limit,
        )

    def start(self) -> asyncio.Task[None]:
        async def generate() -> None:
            async with self.dog.watching():
                await asyncio.get_running_loop().create_future()

        return asyncio.create_task(generate())


@on_virtual_time
async def test_all_generations_of_a_silent_worker_end_with_how_long_it_was_silent() -> None:
    watched = Watched(Silent(patience_s=1.0))
    tasks = [watched.start() for _ in range(3)]

    for task in tasks:
        with pytest.raises(Unreachable, match=r"its worker hung for 1(\.\d+)? s and is restarted"):
            await task
    assert clock.now() < 1001.2 and len(watched.hung) == 1 and watched.hung[0] >= 1.0


@on_virtual_time
async def test_a_worker_that_gives_signs_or_owes_none_is_left_alone() -> None:
    watched = Watched(Silent(patience_s=1.0))
    task = watched.start()
    for _ in range(20):
        await clock.sleep(0.6)
        watched.worker.since = clock.now()
    watched.worker.since = None  # its reader does not read
    await clock.sleep(100.0)
    assert not task.done() and watched.hung == [] and watched.dog.overdue_s == 0.0

    watched.worker.since = clock.now()
    with pytest.raises(Unreachable):
        await task


@on_virtual_time
async def test_while_too_little_is_known_the_limit_holds() -> None:
    watched = Watched(Silent(patience_s=inf), limit_s=30.0)
    task = watched.start()
    await clock.sleep(29.0)
    assert not task.done() and watched.dog.overdue_s == 29.0
    with pytest.raises(Unreachable):
        await task
    assert clock.now() == pytest.approx(1030.0, abs=0.1)


@on_virtual_time
async def test_a_worker_without_a_core_is_excused_but_not_for_ever() -> None:
    watched = Watched(Silent(patience_s=2.0))
    watched.excused_always = True
    task = watched.start()
    await clock.sleep(9.0)
    assert not task.done()
    with pytest.raises(Unreachable):
        await task
    assert clock.now() == pytest.approx(1010.0, abs=0.2)  # five times its patience


@on_virtual_time
async def test_a_device_excuses_a_worker_that_computes_up_to_the_limit() -> None:
    watched = Watched(Silent(patience_s=1.0), limit_s=20.0, to_limit=True)
    watched.excused_always = True
    task = watched.start()
    await clock.sleep(18.0)
    assert not task.done()
    with pytest.raises(Unreachable):
        await task
    assert clock.now() == pytest.approx(1020.0, abs=1.1)


@on_virtual_time
async def test_nothing_is_watched_without_a_generation_and_errors_of_the_work_are_its_own() -> None:
    watched = Watched(Silent(patience_s=1.0))
    loop = asyncio.get_running_loop()
    for error in (TimeoutError("its own"), ValueError("its own")):
        with pytest.raises(type(error), match="its own"):
            async with watched.dog.watching():
                raise error
    task = watched.start()
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert loop.timers == []  # type: ignore[attr-defined]
    await clock.sleep(100.0)
    assert watched.hung == [] and watched.dog.overdue_s == 0.0

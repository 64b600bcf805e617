"""One incarnation after another under a supervised worker: on virtual time, with fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.loop import on_virtual_time, settle
from tests.support.pool.fake_worker import FakeWorker
from tidegate import clock
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.runtime.process import StartError
from tidegate.workers.incarnation import WARMUP_TIMEOUT_S, Incarnation
from tidegate.workers.supervised import CRASH_LOOP, HEALTHY_S, SupervisedWorker


class Owner:
    """Writes down what it hears; what goes wrong next is set by the test."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.heard: list[str] = []
        self.states: list[str] = []
        self.delays_s: list[float] = []
        self.fail_starts = 0
        self.defect: Exception | None = None
        self.warm_up_s = 0.0
        self.supervised = SupervisedWorker[FakeWorker](
            self,
            start=self.start,
            name_of=lambda number: f"w.{number}",
            backoff=Backoff(lambda: 1.0, base_s=0.5, cap_s=30.0),
            cannot_start="it cannot start",
        )

    def start(self, name: str) -> FakeWorker:
        if self.fail_starts:
            self.fail_starts -= 1
            raise OSError("no processes left")
        self.workers.append(FakeWorker(name))
        return self.workers[-1]

    async def prepare(self, worker: FakeWorker) -> float:
        self.supervised.become("warming")
        await clock.sleep(self.warm_up_s)
        if self.defect is not None:
            raise self.defect
        return 1.5

    async def end_of(self, worker: FakeWorker) -> str:
        return await worker.died()

    def serve(self, incarnation: Incarnation[FakeWorker]) -> None:
        self.heard.append(f"serve {incarnation.name}")

    def back(self, incarnation: Incarnation[FakeWorker]) -> None:
        self.heard.append(f"back {incarnation.name}")

    def successor_lost(self, incarnation: Incarnation[FakeWorker], successor: Incarnation[FakeWorker]) -> None:
        self.heard.append(f"{successor.name} lost, {incarnation.name} stays")

    def ending(self, incarnation: Incarnation[FakeWorker]) -> None:
        self.heard.append(f"ending {incarnation.name}")

    def lost(self, incarnation: Incarnation[FakeWorker]) -> None:
        self.heard.append(f"lost {incarnation.name}: {incarnation.reason}")

    def restarting(self, incarnation: Incarnation[FakeWorker], delay_s: float) -> None:
        self.delays_s.append(delay_s)

    async def retire(self, incarnation: Incarnation[FakeWorker]) -> None:
        self.heard.append(f"retire {incarnation.name}")

    def changed(self) -> None:
        self.states.append(self.supervised.state)


@asynccontextmanager
async def living() -> AsyncIterator[Owner]:
    owner = Owner()
    task = asyncio.create_task(owner.supervised.live())
    try:
        await owner.supervised.ready_once.wait()
        yield owner
    finally:
        await cancel_and_wait(task)


@on_virtual_time
async def test_a_worker_is_served_once_it_is_warm_and_ends_with_its_supervision() -> None:
    async with living() as owner:
        current = owner.supervised.current
        assert current is not None
        assert (current.name, current.serving, current.restart_s) == ("w.1", True, 1.5)
        assert owner.states == ["warming", "ready"]
        assert owner.heard == ["serve w.1"]
        assert repr(owner.supervised) == "<SupervisedWorker ready, incarnation 1>"
    assert not owner.workers[0].alive


@on_virtual_time
async def test_a_dead_worker_is_followed_by_another_after_the_backoff() -> None:
    async with living() as owner:
        owner.workers[0].kill()
        await settle(20)
        assert owner.supervised.state == "loading"
        assert owner.delays_s == [0.5]
        await clock.sleep(0.5)
        await settle(20)
        lost = "lost w.1: was killed by SIGKILL"
        assert owner.heard == ["serve w.1", "ending w.1", lost, "serve w.2", "back w.2"]
        assert owner.supervised.state == "ready"


@on_virtual_time
async def test_a_crash_loop_is_bad_and_still_tried_with_growing_waits_until_there_was_health() -> None:
    async with living() as owner:
        for _ in range(CRASH_LOOP):
            owner.workers[-1].kill()
            await settle(20)
            state = owner.supervised.state
            await clock.sleep(owner.delays_s[-1])
            await settle(20)
        assert state == "bad"
        assert owner.supervised.state == "ready"
        assert owner.delays_s == [0.5, 1.0, 2.0]
        await clock.sleep(HEALTHY_S)
        owner.workers[-1].kill()
        await settle(20)
        assert owner.delays_s[-1] == 0.5
        assert owner.supervised.state == "loading"


@pytest.mark.parametrize(
    ("fail_starts", "warm_up_s", "message"),
    [
        (1, 0.0, "it cannot start: the worker could not be started: no processes left"),
        (0, 2 * WARMUP_TIMEOUT_S, "it cannot start: the worker was not warm within 300 s"),
    ],
)
def test_a_first_incarnation_that_does_not_come_up_is_a_reason_not_to_start(
    fail_starts: int, warm_up_s: float, message: str
) -> None:
    @on_virtual_time
    async def check() -> None:
        owner = Owner()
        owner.fail_starts, owner.warm_up_s = fail_starts, warm_up_s
        with pytest.raises(StartError, match=message):
            await owner.supervised.live()
        assert not any(worker.alive for worker in owner.workers)

    check()


@on_virtual_time
async def test_a_defect_of_the_preparation_is_raised_and_not_retried() -> None:
    owner = Owner()
    owner.defect = ZeroDivisionError("a defect")
    with pytest.raises(ZeroDivisionError, match="a defect"):
        await owner.supervised.live()
    assert len(owner.workers) == 1
    assert not owner.workers[0].alive


@on_virtual_time
async def test_a_successor_takes_over_once_it_is_warm() -> None:
    async with living() as owner:
        assert await owner.supervised.replace(successor_first=True)
        assert [worker.alive for worker in owner.workers] == [False, True]
        assert owner.heard == ["serve w.1", "serve w.2", "retire w.1", "serve w.2", "back w.2"]
        assert owner.delays_s == []


@on_virtual_time
async def test_without_room_for_two_the_old_one_goes_first() -> None:
    async with living() as owner:
        assert await owner.supervised.replace(successor_first=False)
        assert [worker.alive for worker in owner.workers] == [False, True]
        assert owner.heard == ["serve w.1", "retire w.1", "serve w.2", "back w.2"]


@on_virtual_time
async def test_a_successor_that_does_not_come_up_leaves_the_old_one_serving() -> None:
    async with living() as owner:
        owner.fail_starts = 1
        assert not await owner.supervised.replace(successor_first=True)
        await settle(20)
        assert owner.heard == ["serve w.1", "w.2 lost, w.1 stays", "serve w.1"]
        assert owner.supervised.current is not None
        assert owner.supervised.current.name == "w.1"
        assert await owner.supervised.replace(successor_first=True), "it can be tried again"


@on_virtual_time
async def test_a_worker_that_is_not_ready_is_not_replaced() -> None:
    async with living() as owner:
        owner.workers[0].kill()
        await settle(20)
        assert not await owner.supervised.replace(successor_first=True)

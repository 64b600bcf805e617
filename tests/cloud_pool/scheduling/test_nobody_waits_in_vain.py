"""Random runs of the scheduler: each request is answered once, and no work waits beside a worker that could take it.

Each run draws lanes, policies, workers and memory, and then throws at them what a day throws at a pool: bursts, callers
who leave one by one and all at once (also in the very instant in which a batch is formed), workers that die, hang, are
recycled and come back, engines that fail or have no memory, and limits that a steward turns. On virtual time, so a run
is the same each time.

The invariant is a fixed point: in any instant, once everything that is ready has run, to look for work once more finds
none to begin. So nothing was waiting for somebody to look, which is what a lost wake-up is.

`TIDEGATE_CHANCES=5000 pytest test_nobody_waits_in_vain.py` looks for longer.
"""

from __future__ import annotations

import asyncio
import os
from math import inf
from pathlib import Path
from random import Random
from typing import Final

import pytest
from structlog.testing import capture_logs

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.core.health.standby import Standby
from cloud_pool.scheduling.job import PoolRequest, PoolResult
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.workers.device_worker import DeviceWorker
from tests.cloud_pool.models import TEXT, manifest_of
from tests.cloud_pool.workers_support import text
from tests.support.loop import run, settle
from tests.support.pool.fake_worker import BAD_ID, FakeWorker
from tests.support.pool.lane_pool import COST, service_s, total
from tidegate import clock
from tidegate.models.manifest import Batching, Manifest
from tidegate.outcome import InternalError, OutOfMemory, ServeError
from tidegate.workers.process import EngineSpec

CHANCES: Final = int(os.environ.get("TIDEGATE_CHANCES", "40"))
_STEPS: Final = 60
_PATIENCE_S: Final = 300.0  # by then everybody must have been answered: no budget or batch is nearly as long


class World:
    """One pool under one seed."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.lanes: list[ModelInstance] = []
        self.lives: dict[str, FakeWorker] = {}
        self.keepers: list[asyncio.Task[None]] = []
        self.callers: list[tuple[asyncio.Task[PoolResult], float]] = []
        self.over = False
        standby = Standby(wait_s=0.5, calm_s=1.0) if self.chance.random() < 0.3 else None
        self.scheduler = PoolScheduler(standby)
        self.limit_bytes = self.chance.choice([inf, inf, 4e6])

    async def play(self) -> None:
        with capture_logs() as logs:
            async with self.scheduler:
                await self._open()
                for _ in range(_STEPS):
                    self._step()
                    await settle(20)
                    self.check_that_nothing_was_left()
                    await clock.sleep(self.chance.choice([0.0, 0.001, 0.02, 0.1, 0.3, 1.0]))
                    await settle(20)
                    self.check_that_nothing_was_left()
                await self._end()
        assert not [entry for entry in logs if "exc_info" in entry], "a defect was caught"

    def check_that_nothing_was_left(self) -> None:
        """Another dispatch must begin nothing.

        Three things may change by time alone, without a timer and without harm, since other workers compute: a batch
        held back for batch-mates, a reserve called in by a prediction, and a group that fits into the memory left.
        """
        seats = self.scheduler.seats
        if seats.standby is not None or self.limit_bytes < inf:
            return
        before = {id(seat.running) for seat in seats}
        self.scheduler.dispatch()
        begun = [seat.running for seat in seats if seat.running is not None and id(seat.running) not in before]
        assert not [batch for batch in begun if not _holds_back(batch.lane.manifest.batching)], self.scheduler

    # What a pool is made of.

    async def _open(self) -> None:
        chance = self.chance
        for number in range(chance.randint(1, 3)):
            manifest = _manifest(chance, number)
            lane = ModelInstance(f"{manifest.name}:1/fp32", manifest, manifest.variants[0], COST)
            lane.memory.footprint.record(1.0, 1e4)
            lane.memory.footprint.record(100.0, 2e6)
            self.lanes.append(lane)
            self.scheduler.open(lane)
        places = chance.randint(1, 3)
        self.scheduler.seats.expected = places
        for place in range(places):
            standby = self.scheduler.seats.standby is not None and place == places - 1 > 0
            self.scheduler.seats.expected -= standby
            self.keepers.append(asyncio.create_task(self._keep(f"w{place}", standby), name=f"keeper {place}"))
        await settle()

    async def _keep(self, place: str, standby: bool) -> None:
        """What a slot does: one life after another."""
        life = 0
        while not self.over:
            life += 1
            name = f"{place}.{life}"
            async with FakeWorker(name, service_s=self._service_s) as worker:
                for lane in self.lanes:
                    await worker.load(EngineSpec(lane.key, "onnx", Path(__file__), ()))
                device = DeviceWorker(worker, device="cpu", threads=1, hang_timeout_s=20.0)
                scheduler, self.lives[name] = self.scheduler, worker
                scheduler.allotment.join(name, "cpu", held_bytes=1e5, limit_bytes=self.limit_bytes)
                scheduler.attach(name, device.infer, restart_s=1.0, standby=standby)
                reason = await device.end()
                scheduler.detach(name, reason)
                del self.lives[name]
            await clock.sleep(self.chance.choice([0.0, 0.5, 2.0]))

    def _service_s(self, inputs: object) -> float:
        slow = self.chance.choice([0.2, 1.0, 1.0, 1.0, 3.0, 15.0]) if self.chance.random() < 0.3 else 1.0
        return slow * service_s(inputs)  # type: ignore[arg-type]

    # What happens to it.

    def _step(self) -> None:
        chance = self.chance
        events = [self._burst] * 6 + [self._one_leaves] * 2
        events += [self._all_leave, self._all_leave_when_one_is_prepared, self._turn_a_knob, self._fail_next]
        events += [self._kill, self._recycle] if chance.random() < 0.3 else []
        chance.choice(events)()

    def _burst(self) -> None:
        for _ in range(self.chance.choice([1, 1, 2, 5, 20])):
            self._come()

    def _come(self) -> None:
        chance, now = self.chance, clock.now()
        length, rows = chance.choice([1, 5, 10, 40]), chance.choice([1, 1, 1, 1, 2, 12])
        fill = BAD_ID if chance.random() < 0.03 else chance.randint(1, 9)
        arrays = text(length, rows=rows, fill=fill)
        worker = chance.choice(sorted(self.lives)) if self.lives and chance.random() < 0.15 else None
        deadline = now + chance.choice([0.05, 0.5, 2.0, 10.0, 60.0])
        ask = PoolRequest(arrays, float(arrays["ids"].size), now, deadline, chance.choice([0, 0, 1]), worker=worker)
        lane = chance.choice(self.lanes)
        caller = asyncio.create_task(self.scheduler.submit(lane.key, ask), name="caller")
        self.callers.append((caller, float(length * fill)))

    def _one_leaves(self) -> None:
        waiting = [caller for caller, _ in self.callers if not caller.done()]
        if waiting:
            self.chance.choice(waiting).cancel()

    def _all_leave(self) -> None:
        for caller, _ in self.callers:
            caller.cancel()

    def _all_leave_when_one_is_prepared(self) -> None:
        at = [seat.prepare_at for seat in self.scheduler.seats if seat.prepare_at is not None]
        if at:
            asyncio.get_running_loop().call_at(self.chance.choice(at), self._all_leave)

    def _turn_a_knob(self) -> None:
        self.scheduler.seats.most_at_once = self.chance.choice([1, 2, inf])
        self.scheduler.queues.cap_batches(self.chance.choice([0.1, 0.5, 1.0]))
        self.scheduler.look()

    def _fail_next(self) -> None:
        if self.lives:
            error = self.chance.choice([InternalError("a kernel"), OutOfMemory("none")])
            self.lives[self.chance.choice(sorted(self.lives))].fails.append(error)

    def _kill(self) -> None:
        if self.lives:
            self.lives[self.chance.choice(sorted(self.lives))].kill()

    def _recycle(self) -> None:
        async def recycle(name: str, worker: FakeWorker) -> None:
            await self.scheduler.retire(name)
            self.scheduler.detach(name, "recycled")
            worker.kill()

        if self.lives:
            name = self.chance.choice(sorted(self.lives))
            self.keepers.append(asyncio.create_task(recycle(name, self.lives[name]), name="recycle"))

    async def _end(self) -> None:
        """Every caller is answered, and no state of any request is left."""
        scheduler, tasks = self.scheduler, [caller for caller, _ in self.callers]
        self.scheduler.seats.most_at_once = inf
        self.scheduler.look()
        async with asyncio.timeout(_PATIENCE_S):
            await asyncio.gather(*tasks, return_exceptions=True)
        for caller, wanted in self.callers:
            if not caller.cancelled() and caller.exception() is None:
                assert total(caller.result()) == wanted
            elif not caller.cancelled():
                assert isinstance(caller.exception(), ServeError), repr(caller.exception())
        await clock.sleep(60.0)  # what was given up by all is computed nevertheless, if it had begun
        assert (scheduler.queued, scheduler.in_flight) == (0, 0), scheduler
        assert scheduler.unsettled == 0 and scheduler.allotment.under_way == 0
        assert all(len(queue.batcher) == 0 for queue in scheduler.queues)
        assert [memory.reserved_bytes() for memory in scheduler.allotment.devices.values()] == [0.0]
        self.over = True
        for task in self.keepers:
            task.cancel()
        await asyncio.gather(*self.keepers, return_exceptions=True)


def _holds_back(batching: Batching) -> bool:
    return batching.max_queue_delay_s > 0.0 or batching.policy == "adaptive"


def _manifest(chance: Random, number: int) -> Manifest:
    policy = chance.choice(["deadline", "deadline", "deadline", "eager", "window", "adaptive", "none"])
    batching = Batching(
        max_batch_size=chance.choice([1, 4, 8]),
        max_queue_size=chance.choice([4, 16, 64]),
        pad_axis="sequence",
        policy=policy,
        max_queue_delay_s=chance.choice([0.0, 0.05]) if policy in ("deadline", "window") else 0.0,
    )
    return manifest_of(TEXT, name=f"text{number}", batching=batching)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CHANCES))
def test_everybody_is_answered_once_and_no_work_waits_beside_a_free_worker(seed: int) -> None:
    run(World(seed).play())

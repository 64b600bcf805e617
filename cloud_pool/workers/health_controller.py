"""The health controller looks at the workers every few seconds, and does what the pure cores decide.

    read       what each worker computed, holds and used since the last look, and how full the memory is
    health     is one of them not what it was?                            cloud_pool/core/health/worker_health.py
    recycling  then is it replaced now, and is there memory to start its successor first?   recycling.py, replica.py
    control    batch cap, concurrency, precision                          cloud_pool/core/health/adaptive_control.py

It never touches a request: everything that it does, it does to the scheduler's limits or to a replica. Whatever it does
is one log line and one count with the reason (`turns`, `recycles`), which `cloud_pool/metrics.py` prints.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final, Self

import structlog

from cloud_pool.core.batching.latency_targets import batch_limit_s
from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.core.health.adaptive_control import AdaptiveControl, ControlReadings
from cloud_pool.core.health.worker_health import (
    CHECK_S,
    BatchTime,
    HealthLimits,
    Vitals,
    WorkerHealth,
    common_excess,
)
from cloud_pool.scheduling.scheduler import AnsweredJob, PoolScheduler
from cloud_pool.scheduling.worker_slots import ComputedBatch, WorkerSlot
from cloud_pool.workers.model_workers import ModelWorkers
from cloud_pool.workers.replica import Replica
from tidegate import clock
from tidegate.estimate.quantiles import nearest_rank
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.workers.recycling import Recycling, RecyclingCandidate
from tidegate.workers.vitals import ProcessUsage, free_bytes, read_process

OVERLOAD_RATIO: Final = 0.9  # of the time of those that would be left
_ROOM_RATIO: Final = 1.2  # of what a worker holds: so much must be free to start its successor beside it
_FEWEST_ANSWERS: Final = 20  # for a p99: where a look has fewer, ...
_LOOKS_BACK: Final = 10  # ... the latest of so many looks stand in, and then answers are too few

log = structlog.get_logger("steward")


@dataclass(slots=True)
class _ReplicaWatch:
    """One incarnation of a worker under watch, and what its counters showed last."""

    health: WorkerHealth
    served_most: float
    cpu_s: float
    busy_s: float
    rss_bytes: float


class HealthController:
    """Looks until the end of `async with`.

    Args:
        recycling: None never recycles.
        latency_target_s: seconds that 99 of 100 answers should keep; None: each model's own; infinity: no target.
        full_cost_ratio: how much longer the full variants compute than the lesser ones.
        on_turn: called after limits were changed.
    """

    def __init__(
        self,
        supervisor: ModelWorkers,
        scheduler: PoolScheduler,
        *,
        limits: HealthLimits,
        recycling: Recycling | None,
        control: AdaptiveControl,
        latency_target_s: float | None = None,
        full_cost_ratio: Callable[[], float] = lambda: 1.0,
        every_s: float = CHECK_S,
        read: Callable[[int | None], ProcessUsage | None] = read_process,
        free: Callable[[], tuple[float, float] | None] = free_bytes,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.recycles: Counter[str] = Counter()  # by the sign that led to it
        self.turns: Counter[tuple[str, str]] = Counter()  # by knob, and the reading that led to it
        self.control = control
        self.busy_ratio = 0.0
        self.memory_ratio = 0.0
        self._supervisor = supervisor
        self._scheduler = scheduler
        self._limits = limits
        self._recycling = recycling
        self._latency_target_s = latency_target_s
        self._full_cost_ratio = full_cost_ratio
        self._every_s = every_s
        self._read = read
        self._free = free
        self._on_turn = on_turn
        self._watched: dict[str, _ReplicaWatch] = {}
        self._looked_at = clock.now()
        self._refused = 0
        self._answers: deque[tuple[float, float]] = deque(maxlen=_FEWEST_ANSWERS)  # (instant of the look, share)
        self._task: asyncio.Task[None] | None = None
        self._recycle: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._looked_at = clock.now()
        self._task = asyncio.create_task(self._watch(), name="steward")
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(*[task for task in (self._task, self._recycle) if task is not None])

    @property
    def health(self) -> dict[str, WorkerHealth]:
        """By the name of the worker."""
        return {name: watched.health for name, watched in self._watched.items()}

    @property
    def memory_bytes(self) -> dict[str, float]:
        """Resident, at the last look, by the name of the worker."""
        return {name: watched.rss_bytes for name, watched in self._watched.items()}

    async def _watch(self) -> None:
        while True:
            await clock.sleep(self._every_s)
            try:
                self.look()
            except Exception:  # a defect of ours here must not end the looking, nor the service
                log.exception("the workers could not be looked after")

    def look(self) -> None:
        """Look once, and act."""
        now = clock.now()
        elapsed_s, self._looked_at = max(1e-3, now - self._looked_at), now
        seats = [(slot, seat) for slot in self._supervisor.slots if (seat := self._seat_of(slot)) is not None]
        seen = {seat.name: seat.take_seen() for _, seat in seats}
        busy_s = sum(self._examine(slot, seat, seen[seat.name], elapsed_s) for slot, seat in seats)
        primaries = sum(not slot.standby for slot in self._supervisor.slots)
        self.busy_ratio = min(1.0, busy_s / (elapsed_s * max(1, len(seats))))
        self._scheduler.seats.expected = primaries
        self._scheduler.seats.busy_without = busy_s / (elapsed_s * max(1, primaries))
        for name in set(self._watched) - {seat.name for _, seat in seats}:
            del self._watched[name]
        self._turn_knobs([one for batches in seen.values() for one in batches], len(seats), now)
        if self._recycling is not None:
            self._recycle_one(self._recycling, [slot for slot, _ in seats], now)

    def _seat_of(self, slot: Replica) -> WorkerSlot | None:
        return None if slot.current is None else self._scheduler.seats.get(slot.current.name)

    def _examine(self, slot: Replica, seat: WorkerSlot, batches: list[ComputedBatch], elapsed_s: float) -> float:
        """Judge one worker's health; returns the seconds that it was busy."""
        life = slot.current
        assert life is not None and life.worker is not None
        process = self._read(life.worker.pid)
        rss_bytes, cpu_s = (process.rss_bytes, process.cpu_s) if process is not None else (0.0, 0.0)
        watched = self._watched.get(seat.name)
        if watched is None:
            health = WorkerHealth(self._limits, warm_rss_bytes=rss_bytes)
            served_most = inf if self._recycling is None else self._recycling.served_most()
            watched = _ReplicaWatch(health, served_most, cpu_s, 0.0, rss_bytes)
            self._watched[seat.name] = watched
        busy_s, watched.busy_s = seat.busy_s - watched.busy_s, seat.busy_s
        used_s, watched.cpu_s, watched.rss_bytes = cpu_s - watched.cpu_s, cpu_s, rss_bytes
        free = self._free()
        vitals = Vitals(
            elapsed_s=elapsed_s,
            busy_s=busy_s,
            cpu_s=used_s,
            threads=slot.place.threads or 1,
            rss_bytes=rss_bytes,
            memory_limit_bytes=inf if free is None else rss_bytes + free[0],
            batches=[BatchTime(one.table_s, one.took_s, batch_limit_s(one.target_s, one.table_s)) for one in batches],
        )
        peers = [other.health for name, other in self._watched.items() if name != seat.name]
        watched.health.check(vitals, common=common_excess(peers))
        return busy_s

    def _turn_knobs(self, batches: list[ComputedBatch], workers: int, now: float) -> None:
        free = self._free()
        self.memory_ratio = 0.0 if free is None else 1.0 - free[0] / free[1]
        # A batch of one row cannot be made smaller, however long it takes.
        shares = sorted(self._share_of_target(one) for one in batches if one.rows > 1)
        readings = ControlReadings(
            self.busy_ratio,
            self.memory_ratio,
            self._p99_ratio(now),
            nearest_rank(shares, 0.99) if shares else 0.0,
            max(1, workers),
            self._full_cost_ratio(),
        )
        actions = self.control.decide(readings, now)
        for action in actions:
            log.warning("control", knob=action.knob, value=action.value, reason=action.reason)
            self.turns[action.knob, action.reason.split()[0]] += 1
        if actions:
            self._on_turn()
        self._scheduler.queues.cap_batches(self.control.batch_cap_ratio)
        held_back = self.control.held_back > 0
        self._scheduler.seats.most_at_once = self.control.concurrency(workers) if held_back else inf
        self._scheduler.look()

    def _share_of_target(self, one: AnsweredJob | ComputedBatch) -> float:
        return one.took_s / (one.target_s if self._latency_target_s is None else self._latency_target_s)

    def _p99_ratio(self, now: float) -> float | None:
        """The p99 of answers, as a share of their target, since the last look; where few, of the latest ones.

        Few answers are no calm: a pool so late that it gave three in a look was taken for one without load.
        """
        answers = [self._share_of_target(one) for one in self._scheduler.answered]
        self._scheduler.answered.clear()
        self._answers.extend((now, share) for share in answers)
        while self._answers and self._answers[0][0] < now - _LOOKS_BACK * self._every_s:
            self._answers.popleft()
        if len(answers) < _FEWEST_ANSWERS:
            answers = [share for _, share in self._answers]
        return nearest_rank(sorted(answers), 0.99) if len(answers) >= _FEWEST_ANSWERS else None

    def _recycle_one(self, recycling: Recycling, slots: list[Replica], now: float) -> None:
        refused, self._refused = self._scheduler.refused - self._refused, self._scheduler.refused
        both_fit = all(self._has_room_for_another(slot) for slot in slots)
        left = len(slots) if both_fit else max(1, len(slots) - 1)
        overloaded = refused > 0 or self.busy_ratio * len(slots) > OVERLOAD_RATIO * left
        by_name = {slot.current.name: slot for slot in slots if slot.current is not None}
        candidates = [self._candidate(name) for name in by_name]
        all_there = all(slot.state == "ready" for slot in self._supervisor.slots)
        chosen = recycling.decide(candidates, now, all_there=all_there, overloaded=overloaded)
        if chosen is not None:
            self._recycle = asyncio.create_task(
                self._replace(recycling, by_name[chosen.worker], chosen), name="recycle"
            )

    def _candidate(self, name: str) -> RecyclingCandidate:
        watched, seat = self._watched[name], self._scheduler.seats.get(name)
        return RecyclingCandidate(name, watched.health.complaint, seat.served if seat else 0, watched.served_most)

    async def _replace(self, recycling: Recycling, slot: Replica, chosen: RecyclingCandidate) -> None:
        reason, first = chosen.reason or "", self._has_room_for_another(slot)
        self.recycles[reason.partition(":")[0]] += 1
        log.warning("worker recycled", worker=chosen.worker, reason=reason, successor_first=first)
        try:
            if not await slot.recycle(successor_first=first):
                log.warning("worker not recycled: its successor did not come up", worker=chosen.worker)
        finally:
            recycling.ended(clock.now())

    def _has_room_for_another(self, slot: Replica) -> bool:
        """Whether a second worker fits beside this one for as long as it takes to hand over."""
        assert slot.current is not None and slot.current.worker is not None
        device = slot.current.worker.on_device
        if device is not None:
            held_bytes, device_bytes = device
            return _ROOM_RATIO * held_bytes < device_bytes - held_bytes
        free = self._free()
        return free is not None and _ROOM_RATIO * self._watched[slot.current.name].rss_bytes < free[0]

    def __repr__(self) -> str:
        return f"<HealthController of {len(self._watched)} workers, busy {self.busy_ratio:.0%}, {self.control!r}>"


def cost_ratio(lanes: Iterable[ModelInstance], lesser: str | None) -> float:
    """How much longer full variants compute than those of this precision, at the middle of what was measured."""
    ratios = [1.0]
    by_model: dict[str, list[ModelInstance]] = {}
    for lane in lanes:
        by_model.setdefault(lane.manifest.name, []).append(lane)
    for first, *others in by_model.values():
        units = first.cost[len(first.cost) // 2][0]
        found = [lane for lane in others if lane.variant.precision == lesser]
        ratios += [first.service.table.seconds_for(units) / lane.service.table.seconds_for(units) for lane in found]
    return max(ratios)

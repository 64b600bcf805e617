"""The worker slots: one per worker of the scheduler, with the batch that it computes and the one prepared for it.

From the end of one batch to the start of the next a worker idles for as long as this process takes to notice, choose,
lay out and send. So the next batch may be sent a moment before the present one should end (`lead_s`), and lies in the
worker's memory by then. That gives up the choice for that moment, which has a cost: so it is done only where more
requests wait than the next batch holds, so that a new arrival would not have joined it.

A slot exists from `PoolScheduler.attach` to `PoolScheduler.detach`, which is one incarnation of a worker: its successor
has another name, so nothing that was bound to the old worker reaches the new one.

Not every attached worker may begin a batch: a reserve rests until it is needed
(`cloud_pool/core/health/standby.py`), one that has just replaced another takes a growing share
(`cloud_pool/core/health/slow_start.py`), and where memory is short fewer compute at once
(`cloud_pool/core/health/adaptive_control.py`).

A worker holds every model instance but those that have workers of their own, or is such a worker and holds some of them
(`WorkerSlot.lanes`), where models come and go while the pool serves, or one of the fixed ones came later. Then several
workers share a place, which is a device with its threads and cores: one of them computes at a time there, so that what
a batch takes is still what was measured.

The computed batches of a slot are kept until `take_seen` collects them, so that health is judged apart from serving.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final

import structlog

from cloud_pool.core.batching.padding import Arrays
from cloud_pool.core.health.slow_start import WARM_S, rest_s
from cloud_pool.core.health.standby import Standby
from cloud_pool.scheduling.job import Batch
from tidegate.workers.process import ComputeResult

# Takes the model instance's key, the batch, and the seconds until it counts as stuck.
Compute = Callable[[str, Arrays, float], Awaitable[ComputeResult]]

log = structlog.get_logger("scheduler")

NOTICE_S: Final = 0.002  # for this process to notice an end, choose, lay out and send, when busy
_MOST_SEEN: Final = 4096  # batches between two looks; older ones are forgotten


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """One computed batch: when it ended, its seconds by the cost table, those that it took, and its model's target."""

    ended_at: float
    table_s: float
    took_s: float
    target_s: float
    rows: int


@dataclass(slots=True, eq=False, repr=False)
class WorkerSlot:
    """Mutable. A `retiring` worker gets no new batch, and ends when it has finished the ones it has.

    `restart_s` is how long a successor would take to be ready; until `rests_until` the worker begins no batch.
    """

    name: str
    compute: Compute
    restart_s: float
    attached_at: float
    free_since: float
    standby: bool = False
    lanes: frozenset[str] | None = None  # the keys of the model instances that it holds; None: of all but `apart`
    apart: Container[str] = ()
    place: str = ""
    rests_until: float = 0.0
    served: int = 0
    running: Batch | None = None
    prepared: Batch | None = None
    retiring: bool = False
    gone: bool = False
    busy_s: float = 0.0
    seen: deque[ComputedBatch] = field(default_factory=lambda: deque(maxlen=_MOST_SEEN))
    vacated: asyncio.Event = field(default_factory=asyncio.Event)

    def takes(self, lane: str) -> bool:
        """Whether it holds the model instance of this key."""
        return lane not in self.apart if self.lanes is None else lane in self.lanes

    def give(self, batch: Batch, now: float) -> None:
        """Give the worker a batch, which begins now or follows the one that runs."""
        self.vacated.clear()
        if self.running is None:
            self.running = batch
            batch.begin(now, self.free_since)
        else:
            self.prepared = batch

    def end(self, batch: Batch, now: float) -> None:
        """End a batch, however it ended; the prepared one begins, unless the worker is gone."""
        if batch is self.prepared:
            self.prepared = None
        elif batch is self.running:
            self.busy_s += now - batch.began_at
            self.rests_until = now + rest_s(now - self.attached_at, now - batch.began_at)
            self.running, self.prepared, self.free_since = self.prepared, None, now
            if self.running is not None and not self.gone:
                self.running.begin(now, now)
        if self.running is None:
            self.vacated.set()

    def saw(self, batch: Batch, now: float) -> None:
        """Record a batch that came back with results."""
        table_s = batch.lane.service.table.seconds_for(batch.shape.units)
        self.seen.append(ComputedBatch(now, table_s, now - batch.began_at, batch.lane.latency_target_s, batch.rows))
        self.served += len(batch.parts)

    def take_seen(self) -> list[ComputedBatch]:
        """The batches computed since the last call."""
        seen = list(self.seen)
        self.seen.clear()
        return seen

    def busy_for_s(self, now: float) -> float:
        """Predicted seconds until the worker is free."""
        if self.running is None:
            return 0.0
        return max(0.0, self.running.expected_end_at - now) + (self.prepared.takes_s if self.prepared else 0.0)

    def patience_left_s(self, now: float) -> float:
        """Seconds until the worker counts as hung in its running batch; a prepared batch may wait for as long.

        These are not the predicted seconds: a slow batch would use up the patience for the next one.
        """
        return max(0.0, self.running.stuck_at - now) if self.running is not None else 0.0

    @property
    def prepare_at(self) -> float | None:
        """From when on the worker's next batch may be prepared."""
        if self.running is None or self.prepared is not None or self.retiring:
            return None
        lead_s = NOTICE_S + self.running.takes_s * self.running.lane.service.sigma
        return self.running.expected_end_at - lead_s

    @property
    def is_free(self) -> bool:
        return self.running is None and not self.retiring

    def __repr__(self) -> str:
        doing = "computing" if self.running else "retiring" if self.retiring else "idle"
        doing += ", one prepared" if self.prepared else ""
        return f"<WorkerSlot {self.name} {doing}>"


class WorkerSlots:
    """Mutable: `add` and `remove`. While there is no worker, `absence` says why and `back_at` predicts until when.

    `most_at_once` is how many may compute at the same time. `expected` is how many workers there should be without the
    reserve, and `busy_without` the share of their time that they would be busy without its help; the health controller
    keeps these up to date.
    """

    def __init__(self, standby: Standby | None = None) -> None:
        self.absence = "no worker has started yet"
        self.back_at = 0.0
        self.most_at_once: float = inf
        self.expected = 0
        self.busy_without = 0.0
        self.standby = standby
        self.partial = 0  # model instances with workers of their own, whether one is there or not
        self._slots: dict[str, WorkerSlot] = {}
        self._apart: set[str] = set()  # these model instances
        self._absences: dict[str, tuple[str, float]] = {}  # by model instance: why no worker holds it, and until when

    def add(
        self,
        name: str,
        compute: Compute,
        *,
        restart_s: float,
        standby: bool,
        now: float,
        lanes: frozenset[str] | None = None,
        place: str = "",
    ) -> None:
        self._slots[name] = WorkerSlot(
            name,
            compute,
            restart_s,
            attached_at=now,
            free_since=now,
            standby=standby,
            lanes=lanes,
            apart=self._apart,
            place=place or name,
        )
        self._apart |= lanes or frozenset()
        self.partial = len(self._apart)
        for lane in lanes or ():
            self._absences.pop(lane, None)

    def remove(self, name: str, reason: str, now: float) -> bool:
        """Remove a worker; whether it was there."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return False
        slot.gone = True
        if not any(other.lanes is None for other in self) and (slot.lanes is None or not self._slots):
            self.absence, self.back_at = reason, now + slot.restart_s
        for lane in (slot.lanes or frozenset()) & self._apart:  # the others are served no longer
            self._absences[lane] = reason, now + slot.restart_s
        return True

    def absent_until(self, lanes: frozenset[str] | None, at: float) -> None:
        """Predict anew when one of the workers that are gone has a successor: no sooner than `at`."""
        if lanes is None:
            self.back_at = max(self.back_at, at)
        for lane in (lanes or frozenset()) & self._absences.keys():
            reason, back_at = self._absences[lane]
            self._absences[lane] = reason, max(back_at, at)

    def forget(self, lane: str) -> None:
        """Forget a model instance that is served no longer."""
        self._absences.pop(lane, None)
        self._apart.discard(lane)
        self.partial = len(self._apart)

    def absence_of(self, lane: str) -> tuple[str, float] | None:
        """Why no worker holds the model instance, and when one should be back; None where one does."""
        if not self._slots:
            return self._absences.get(lane, (self.absence, self.back_at))
        if not self.partial or any(slot.takes(lane) for slot in self):
            return None
        return self._absences.get(lane, (self.absence, self.back_at))

    def is_taken(self, slot: WorkerSlot) -> bool:
        """Whether another worker computes at its place."""
        return bool(self.partial) and any(
            other.running is not None and other.place == slot.place for other in self if other is not slot
        )

    def free_for(self, lane: str) -> bool:
        """Whether a worker that holds the model instance could begin a batch."""
        return any(slot.is_free and slot.takes(lane) and not self.is_taken(slot) for slot in self)

    def get(self, name: str) -> WorkerSlot | None:
        return self._slots.get(name)

    def free(self, now: float, wait_s: Callable[[], float]) -> list[WorkerSlot]:
        """Workers that may begin a batch now, while `has_room`; the longest idle first, and a reserve last.

        Args:
            wait_s: predicts the wait of a new arrival; called only where there is a reserve.
        """
        helps = self._reserve_helps(now, wait_s)
        free = [slot for slot in self if slot.is_free and (helps or not slot.standby) and not self._rests(slot, now)]
        if self.partial:
            free = [slot for slot in free if not self.is_taken(slot)]
        return sorted(free, key=lambda slot: (slot.standby, slot.free_since))

    @property
    def has_room(self) -> bool:
        """Whether one more worker may compute at the same time."""
        return sum(slot.running is not None for slot in self) < self.most_at_once

    def preparable(self, now: float) -> list[WorkerSlot]:
        """Workers that should get a batch in advance now."""
        due = [slot for slot in self if (at := slot.prepare_at) is not None and at <= now]
        return [slot for slot in due if now - slot.attached_at >= WARM_S or not self._has_veteran(slot, now)]

    def next_at(self, now: float) -> float:
        """When a worker may begin or should get a batch in advance, by time alone; infinity for never."""
        prepare = [at for slot in self if (at := slot.prepare_at) is not None]
        rested = [slot.rests_until for slot in self if slot.is_free]
        return min((at for at in (*prepare, *rested) if at > now), default=inf)

    def any_free(self) -> bool:
        if self.partial:
            return any(slot.is_free and not self.is_taken(slot) for slot in self)
        return any(slot.running is None and not slot.retiring for slot in self._slots.values())

    def busy_s(self, now: float) -> float:
        """Predicted seconds until one of the workers is free."""
        return self.outlook(now)[0]

    @property
    def width(self) -> int:
        """How many workers share the queue; 1 while there is none."""
        if self.partial:
            return self._width(len({slot.place for slot in self}))
        return self._width(len(self._serving()))

    def outlook(self, now: float) -> tuple[float, int]:
        """`busy_s` and `width`: every answer and every accept-ack tells both."""
        if not self._slots:
            return max(0.0, self.back_at - now), 1
        serving = self._serving()
        if self.partial:
            return self._outlook_by_place(now)
        return min([slot.busy_for_s(now) for slot in serving or self]), self._width(len(serving))

    def _outlook_by_place(self, now: float) -> tuple[float, int]:
        busy_s: dict[str, float] = {}
        for slot in self:
            busy_s[slot.place] = busy_s.get(slot.place, 0.0) + slot.busy_for_s(now)
        return min(busy_s.values()), self._width(len(busy_s))

    @property
    def in_flight(self) -> int:
        count = 0
        for slot in self._slots.values():
            if slot.running is not None:
                count += len(slot.running.parts)
            if slot.prepared is not None:
                count += len(slot.prepared.parts)
        return count

    def _width(self, serving: int) -> int:
        return max(1, int(min(self.most_at_once, serving)))

    def _serving(self) -> list[WorkerSlot]:
        helps = self.standby is not None and bool(self.standby.reason)
        return [slot for slot in self._slots.values() if helps or not slot.standby]

    def _reserve_helps(self, now: float, wait_s: Callable[[], float]) -> bool:
        if self.standby is None:
            return False
        missing = max(0, self.expected - sum(not slot.standby and not slot.retiring for slot in self))
        before = self.standby.reason
        helps = self.standby.decide(now, wait_s=wait_s(), missing=missing, busy_without=self.busy_without)
        if bool(before) != helps:
            log.info("reserve called in" if helps else "reserve rests again", reason=self.standby.reason or before)
        return helps

    def _rests(self, slot: WorkerSlot, now: float) -> bool:
        return slot.rests_until > now and self._has_veteran(slot, now)

    def _has_veteran(self, slot: WorkerSlot, now: float) -> bool:
        """Whether a worker past its slow start serves too: without one, new workers do not start slowly either."""
        others = (other for other in self if other is not slot and other.lanes == slot.lanes)
        return any(now - other.attached_at >= WARM_S and not other.retiring for other in others)

    def __iter__(self) -> Iterator[WorkerSlot]:
        return iter(self._slots.values())

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    def __repr__(self) -> str:
        if not self._slots:
            return f"<WorkerSlots none: {self.absence}>"
        return f"<WorkerSlots {sum(slot.running is not None for slot in self)} of {len(self)} computing>"

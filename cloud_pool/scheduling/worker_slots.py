"""The seats: the workers as the scheduler sees them, each with the batch that it computes and one that is prepared.

From the end of one batch to the start of the next a worker idles for as long as this process takes to notice, choose,
lay out and send. So the next batch may be sent a moment before the present one should end (`lead_s`), and lies in the
worker's memory by then. That gives up the choice for that moment, which is worth something: so it is done only where
more wait than the next batch holds, and whoever comes would not have been in it.

A seat exists from `Scheduler.attach` to `Scheduler.detach`, which is one life of a worker: its successor has another
name, so nothing that was bound to the one that is gone reaches the one that came.

Not every worker that is there may begin a batch: a reserve rests until it is needed
(`cloud_pool/core/health/standby.py`), one that has just replaced another takes a growing share
(`cloud_pool/core/health/slow_start.py`), and where memory is short fewer compute at once
(`cloud_pool/core/health/adaptive_control.py`).

What a seat has computed is kept until somebody takes it (`take_seen`), so that health is judged apart from serving.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final

import structlog

from cloud_pool.core.batching.padding import Arrays
from cloud_pool.core.health.slow_start import WARM_S, rest_s
from cloud_pool.core.health.standby import Standby
from cloud_pool.scheduling.job import Batch
from tidegate.workers.process import ComputeResult

Compute = Callable[[str, Arrays, float], Awaitable[ComputeResult]]  # the lane, the batch, and seconds until it is stuck

log = structlog.get_logger("scheduler")

NOTICE_S: Final = 0.002  # what it takes this process to notice an end, choose, lay out and send, on a busy day
_MOST_SEEN: Final = 4096  # batches between two looks; those before are forgotten


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """One computed batch: when it ended, what the lane's table said of it, and what it took."""

    ended_at: float
    table_s: float
    took_s: float
    rows: int


@dataclass(slots=True, eq=False, repr=False)
class WorkerSlot:
    """Mutable. `retiring`: it gets no new batch, and ends when it has done what it has.

    `restart_s` is how long a successor would take to be there; until `rests_until` it begins nothing.
    """

    name: str
    compute: Compute
    restart_s: float
    attached_at: float
    free_since: float
    standby: bool = False
    rests_until: float = 0.0
    served: int = 0
    running: Batch | None = None
    prepared: Batch | None = None
    retiring: bool = False
    gone: bool = False
    busy_s: float = 0.0
    seen: deque[ComputedBatch] = field(default_factory=lambda: deque(maxlen=_MOST_SEEN))
    vacated: asyncio.Event = field(default_factory=asyncio.Event)

    def give(self, batch: Batch, now: float) -> None:
        """The worker has it now: it begins, or follows the one that runs."""
        self.vacated.clear()
        if self.running is None:
            self.running = batch
            batch.begin(now, self.free_since)
        else:
            self.prepared = batch

    def end(self, batch: Batch, now: float) -> None:
        """This batch is over, however it ended; the prepared one has begun, unless the worker is gone."""
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
        """A batch came back with results."""
        table_s = batch.lane.service.table.seconds_for(batch.shape.units)
        self.seen.append(ComputedBatch(now, table_s, now - batch.began_at, batch.rows))
        self.served += len(batch.parts)

    def take_seen(self) -> list[ComputedBatch]:
        """Everything that was computed since the last call."""
        seen = list(self.seen)
        self.seen.clear()
        return seen

    def busy_for_s(self, now: float) -> float:
        """Seconds until it should be free."""
        if self.running is None:
            return 0.0
        return max(0.0, self.running.expected_end_at - now) + (self.prepared.takes_s if self.prepared else 0.0)

    def patience_left_s(self, now: float) -> float:
        """Seconds until it counts as hung in what it computes: until then what follows that may wait in vain.

        Not the seconds that it should take: a slow batch would use up the patience with the next one.
        """
        return max(0.0, self.running.stuck_at - now) if self.running is not None else 0.0

    @property
    def prepare_at(self) -> float | None:
        """From when on its next batch may be prepared."""
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
    """Mutable: `add` and `remove`. While there is none, `absence` says why and `back_at` until when, by prediction.

    `most_at_once` is how many may compute at the same time. `expected` is how many there should be without the
    reserve, and `busy_without` what part of their time they would be busy without its help; whoever watches the
    workers keeps these up to date.
    """

    def __init__(self, standby: Standby | None = None) -> None:
        self.absence = "no worker has started yet"
        self.back_at = 0.0
        self.most_at_once: float = inf
        self.expected = 0
        self.busy_without = 0.0
        self.standby = standby
        self._seats: dict[str, WorkerSlot] = {}

    def add(self, name: str, compute: Compute, *, restart_s: float, standby: bool, now: float) -> None:
        self._seats[name] = WorkerSlot(name, compute, restart_s, attached_at=now, free_since=now, standby=standby)

    def remove(self, name: str, reason: str, now: float) -> bool:
        """Whether it was there."""
        seat = self._seats.pop(name, None)
        if seat is None:
            return False
        seat.gone = True
        if not self._seats:
            self.absence, self.back_at = reason, now + seat.restart_s
        return True

    def get(self, name: str) -> WorkerSlot | None:
        return self._seats.get(name)

    def free(self, now: float, wait_s: Callable[[], float]) -> list[WorkerSlot]:
        """Who may begin a batch now, while `has_room`; who has idled longest comes first, and a reserve last.

        Args:
            wait_s: predicts the wait of who comes now; asked only where there is a reserve.
        """
        helps = self._reserve_helps(now, wait_s)
        free = [seat for seat in self if seat.is_free and (helps or not seat.standby) and not self._rests(seat, now)]
        return sorted(free, key=lambda seat: (seat.standby, seat.free_since))

    @property
    def has_room(self) -> bool:
        """Whether one more may compute at the same time."""
        return sum(seat.running is not None for seat in self) < self.most_at_once

    def preparable(self, now: float) -> list[WorkerSlot]:
        """Who should get a batch in advance now."""
        due = [seat for seat in self if (at := seat.prepare_at) is not None and at <= now]
        return [seat for seat in due if now - seat.attached_at >= WARM_S or not self._has_veteran(seat, now)]

    def next_at(self, now: float) -> float:
        """When somebody may begin or should get a batch in advance, by time alone; infinity where nobody will."""
        prepare = [at for seat in self if (at := seat.prepare_at) is not None]
        rested = [seat.rests_until for seat in self if seat.is_free]
        return min((at for at in (*prepare, *rested) if at > now), default=inf)

    def any_free(self) -> bool:
        return any(seat.is_free for seat in self)

    def busy_s(self, now: float) -> float:
        """Seconds until one of them should be free."""
        if not self._seats:
            return max(0.0, self.back_at - now)
        return min(seat.busy_for_s(now) for seat in self._serving() or self)

    @property
    def width(self) -> int:
        """How many share what waits; 1 while there is none."""
        return max(1, int(min(self.most_at_once, len(self._serving()))))

    @property
    def in_flight(self) -> int:
        return sum(len(batch.parts) for seat in self for batch in (seat.running, seat.prepared) if batch is not None)

    def _serving(self) -> list[WorkerSlot]:
        helps = self.standby is not None and bool(self.standby.reason)
        return [seat for seat in self if helps or not seat.standby]

    def _reserve_helps(self, now: float, wait_s: Callable[[], float]) -> bool:
        if self.standby is None:
            return False
        missing = max(0, self.expected - sum(not seat.standby and not seat.retiring for seat in self))
        before = self.standby.reason
        helps = self.standby.decide(now, wait_s=wait_s(), missing=missing, busy_without=self.busy_without)
        if bool(before) != helps:
            log.info("reserve called in" if helps else "reserve rests again", reason=self.standby.reason or before)
        return helps

    def _rests(self, seat: WorkerSlot, now: float) -> bool:
        return seat.rests_until > now and self._has_veteran(seat, now)

    def _has_veteran(self, seat: WorkerSlot, now: float) -> bool:
        """Whether another is there that does not start slowly: alone, and all together, they do not either."""
        return any(now - other.attached_at >= WARM_S and not other.retiring for other in self if other is not seat)

    def __iter__(self) -> Iterator[WorkerSlot]:
        return iter(self._seats.values())

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, name: object) -> bool:
        return name in self._seats

    def __repr__(self) -> str:
        if not self._seats:
            return f"<WorkerSlots none: {self.absence}>"
        return f"<WorkerSlots {sum(seat.running is not None for seat in self)} of {len(self)} computing>"

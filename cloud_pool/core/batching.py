"""The batcher: requests wait here in the order of their deadlines and leave as batches worth running.

A batch is formed when the worker is free and not before: as long as it computes, waiting costs nothing and a better
batch may yet form; once it is idle, waiting for company costs its time (`reference/numbers.md`, part 2, points 5 to
7). `max_queue_delay_s` can hold a partial batch back nevertheless, counted from the arrival of its oldest member;
it is 0 by default.

The order is earliest deadline first with priority (`tidegate/priority.py`): the first in order is the head, and leaves
in this batch. Who else comes along is decided by what they cost together (`grouping.py`), and never makes the head
late. A companion cannot lose by joining: it would otherwise start after this batch has ended.

What is too late is dropped early and provably: a request that would miss its deadline even if it began now and took
DOOM_RATIO of its predicted time. It is refused when it comes, and removed by a timer (`next_wake`, `expire`) while it
waits, so that it never costs compute. Plain expiry would let hopeless ones take a worker's time from those with hope;
dropping on the full prediction would refuse what a warm cache still makes.

Invariants: an item leaves exactly once, by `release`, `expire` or `remove`; nothing leaves by `release` at or after
its deadline; a batch holds items of one `kind` within the limits, or a single item over them; at most
`max_queue_size` items wait, but that an empty queue takes one request of any size.

It can be wrong where the cost table is: then groups are too large or too small, never incorrect.

Source: `reference/batching.md` D (Triton's scheduler and everyone's bugs), `reference/routing.md` B6 and B7; late,
provable drop as in Clockwork (Gujarati et al., OSDI 2020).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf

from cloud_pool.core.grouping import Limits, Shape, group_of_head
from tidegate.outcome import DeadlineExceeded, Overloaded
from tidegate.priority import order_key

DOOM_RATIO = 0.6  # simulated: late drop at 0.6 gains 6.4 points at 1.2 of the load (`reference/routing.md` B6)
RETRY_AFTER_RANGE_S = (0.05, 30.0)
_SHARING_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Queued:
    """One request, or one part of a large one, as the batcher sees it. Instants are of one monotonic clock."""

    id: int
    arrived_at: float
    deadline: float
    shape: Shape
    kind: Hashable = ()  # only equal kinds may share a batch: datatypes and axes that cannot be padded
    priority: int = 0
    alone: bool = False  # shares with nobody: it was in a batch that failed


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    """An item in its place: by key, then by arrival, then by number."""

    key: float
    arrived_at: float
    number: int
    item: Queued = field(compare=False)
    alone_s: float = field(compare=False)
    doomed_at: float = field(compare=False)


class Batcher:
    """Mutable queue of one model variant on one device.

    Args:
        service_s: predicted seconds of one call of so many units of work.
        max_rows, max_work: limits of one batch; work counts padding.
        max_queue_size: how many items may wait.
        max_queue_delay_s: how long a partial batch may be held back; 0 never waits for company.
    """

    def __init__(
        self,
        service_s: Callable[[float], float],
        *,
        max_rows: int,
        max_work: float = inf,
        max_queue_size: int = 256,
        max_queue_delay_s: float = 0.0,
    ) -> None:
        self._service_s = service_s
        self._limits = Limits(max_rows, max_work)
        self._max_queue_size = max_queue_size
        self._max_queue_delay_s = max_queue_delay_s
        self._entries: list[_Entry] = []
        self._sharing_ratio = 1.0  # what batches cost, as a share of what their members would cost alone; decayed

    def add(self, items: Sequence[Queued], now: float, *, readmit: bool = False) -> None:
        """Queue all parts of one request, or none.

        Args:
            readmit: they were here before and go back (their batch failed), so the queue's size does not count.

        Raises:
            Overloaded: the queue is full; `retry_after_s` is when it should have drained.
            DeadlineExceeded: it is provably too late.
        """
        entries = [self._entry(item) for item in items]
        if not readmit and self._entries and len(self._entries) + len(items) > self._max_queue_size:
            low, high = RETRY_AFTER_RANGE_S
            raise Overloaded(
                f"the queue is full: {len(self._entries)} of {self._max_queue_size} wait",
                retry_after_s=min(max(self.drain_s(), low), high),
            )
        least_s = DOOM_RATIO * sum(entry.alone_s for entry in entries)
        left_s = min(item.deadline for item in items) - now
        if least_s >= left_s:
            raise DeadlineExceeded(
                f"{max(left_s, 0.0) * 1e3:.0f} ms are left, but this takes at least {least_s * 1e3:.0f} ms"
            )
        for entry in entries:
            insort(self._entries, entry)

    def remove(self, ids: Sequence[int]) -> None:
        """Take out those of `ids` that still wait: their caller has left."""
        gone = set(ids)
        self._entries = [entry for entry in self._entries if entry.item.id not in gone]

    def expire(self, now: float) -> list[Queued]:
        """Take out and return what is provably too late."""
        doomed = [entry.item for entry in self._entries if entry.doomed_at <= now]
        if doomed:
            self._entries = [entry for entry in self._entries if entry.doomed_at > now]
        return doomed

    def release(self, now: float) -> list[Queued]:
        """The batch to run now, the head first; empty when there is none yet. Call it when the worker is free."""
        chosen = self._choose(now)
        if not chosen or self._held_until(chosen) > now:
            return []
        self._learn_sharing(chosen)
        self.remove([entry.item.id for entry in chosen])
        return [entry.item for entry in chosen]

    def next_wake(self, now: float, *, worker_free: bool = True) -> float | None:
        """When to call `expire`, or with a free worker `release`, again; None while nothing waits."""
        if not self._entries:
            return None
        doomed_at = min(entry.doomed_at for entry in self._entries)
        chosen = self._choose(now) if worker_free and self._max_queue_delay_s > 0.0 else []
        return min(doomed_at, self._held_until(chosen)) if chosen else doomed_at

    @property
    def head_key(self) -> float:
        """The key of the first in order; infinity when nothing waits."""
        return self._entries[0].key if self._entries else inf

    def ahead(self, key: float) -> tuple[int, float]:
        """How many wait before an order key, and the seconds they should take."""
        before = [entry.alone_s for entry in self._entries if entry.key < key]
        return len(before), self._sharing_ratio * sum(before)

    def drain_s(self) -> float:
        """Predicted seconds until all that waits has been computed."""
        return self._sharing_ratio * sum(entry.alone_s for entry in self._entries)

    def waiting(self) -> list[Queued]:
        """Everything that waits, in order."""
        return [entry.item for entry in self._entries]

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<Batcher {len(self)}/{self._max_queue_size} waiting, drained in {self.drain_s() * 1e3:.0f} ms>"

    def _entry(self, item: Queued) -> _Entry:
        alone_s = self._service_s(item.shape.units)
        key = order_key(item.deadline, item.priority)
        return _Entry(key, item.arrived_at, item.id, item, alone_s, item.deadline - DOOM_RATIO * alone_s)

    def _choose(self, now: float) -> list[_Entry]:
        """The head with its company; those that are doomed are nobody's company."""
        alive = [entry for entry in self._entries if entry.doomed_at > now]
        if not alive:
            return []
        head = alive[0]
        if head.item.alone:
            return [head]
        company = [entry for entry in alive[1:] if entry.item.kind == head.item.kind and not entry.item.alone]
        candidates = [head, *company]
        slack_s = head.item.deadline - now
        limits = Limits(
            self._limits.max_rows,
            self._limits.max_work,
            # A head that is late by prediction has nothing to lose by company.
            slack_s if head.alone_s <= slack_s else inf,
        )
        indices = group_of_head([entry.item.shape for entry in candidates], self._service_s, limits)
        return [candidates[index] for index in indices]

    def _held_until(self, chosen: Sequence[_Entry]) -> float:
        """Until when a batch may wait for company; a full one, and one whose time is short, does not wait."""
        if self._max_queue_delay_s <= 0.0 or sum(entry.item.shape.rows for entry in chosen) >= self._limits.max_rows:
            return -inf
        oldest_at = min(entry.arrived_at for entry in chosen)
        latest_start_at = min(entry.item.deadline for entry in chosen) - self._batch_s(chosen)
        return min(oldest_at + self._max_queue_delay_s, latest_start_at)

    def _batch_s(self, chosen: Sequence[_Entry]) -> float:
        longest = max(entry.item.shape.length for entry in chosen)
        return self._service_s(longest * sum(entry.item.shape.cells for entry in chosen))

    def _learn_sharing(self, chosen: Sequence[_Entry]) -> None:
        ratio = self._batch_s(chosen) / sum(entry.alone_s for entry in chosen)
        self._sharing_ratio += _SHARING_WEIGHT * (min(ratio, 1.0) - self._sharing_ratio)

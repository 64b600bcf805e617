"""The batcher queues requests in the order of their deadlines and releases them as batches.

A batch is formed when the worker is free and not before: as long as the worker computes, waiting costs nothing and a
better batch may yet form; once it is idle, waiting for batch-mates costs its time (docs/design/numbers.md, "Batching
servers", points 5 to 7). `max_queue_delay_s` can hold a partial batch back nevertheless, counted from the arrival of
its oldest member; it is 0 by default.

Which requests form a batch is decided by a policy (`closing_policies.py`), by name in the model's manifest; the batcher
keeps the queue and the invariants that hold under every policy. The queue is in the order of deadlines with priority
(`tidegate/priority.py`); the kind of its first request is the kind of the next batch.

An infeasible request is dropped early and provably: one that would miss its deadline even if it began now and took
EARLY_DROP_RATIO of its predicted time. It is refused on arrival, and removed by a timer (`next_wake`, `expire`) while
it waits, so that it never costs compute. Plain expiry would let infeasible requests take a worker's time from feasible
ones; dropping on the full prediction would refuse requests that a warm cache still makes.

Invariants: an item leaves exactly once, by `release`, `expire` or `remove`; nothing leaves by `release` at or after
its deadline; a batch holds items of one `kind` within the limits, or a single item over them; at most
`max_queue_size` items wait, except that an empty queue takes one request of any size; a request that has waited FAR_S
plus the head start of its priority level is not overtaken by any later arrival, and is in the next batch that is formed
(`closing_policies.py`).

It can be wrong where the cost table is: then groups are too large or too small, never incorrect.

Source: docs/design/batching.md, "When a batch starts" and "Late drop"; docs/design/routing.md, "Provable lateness";
late, provable drop as in Clockwork (Gujarati et al., OSDI 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf, nextafter

from msgspec.structs import replace

from cloud_pool.core.batching.batch_cost import BatchCost
from cloud_pool.core.batching.closing_policies import policy_of
from cloud_pool.core.batching.deadline_queue import SLACK, DeadlineQueue, QueueEntry
from cloud_pool.core.batching.grouping import WINDOW, BatchLimits, batch_seconds
from cloud_pool.core.batching.queue_item import QueueItem
from cloud_pool.core.batching.queue_policy import QueuePolicies
from tidegate.models.manifest import TARGET_BATCH_S, BatchingPolicy
from tidegate.outcome import DeadlineExceeded, Overloaded
from tidegate.priority import LEVEL_S

# simulated: late drop at 0.6 gains 6.4 points at 1.2 of the load (docs/design/routing.md, "Provable lateness")
EARLY_DROP_RATIO = 0.6
RETRY_AFTER_RANGE_S = (0.05, 30.0)
_SHARING_WEIGHT = 0.2
_SCANNED = 4 * WINDOW  # entries after the head among which batch-mates are looked for, however long the queue


class Batcher:
    """Mutable queue of one model variant on one device.

    Args:
        cost: predicts the seconds of a call.
        max_rows, max_work: limits of one batch; work counts padding.
        max_queue_size: how many items may wait.
        max_queue_delay_s: how long a partial batch may be held back; 0 never waits for batch-mates.
        policy: which requests form a batch, and when.
        preferred_batch_size: rows of batches that the policy `window` does not hold back.
        target_batch_s: seconds that a batch should take, by which the policy `adaptive` sets its window.
        queue_policies: limits of waiting requests, by their level of priority.
    """

    def __init__(
        self,
        cost: BatchCost,
        *,
        max_rows: int,
        max_work: float = inf,
        max_queue_size: int = 256,
        max_queue_delay_s: float = 0.0,
        policy: BatchingPolicy = "deadline",
        preferred_batch_size: Sequence[int] = (),
        target_batch_s: float = TARGET_BATCH_S,
        queue_policies: QueuePolicies | None = None,
    ) -> None:
        self._cost = cost
        self._policy = policy_of(
            policy,
            cost,
            BatchLimits(max_rows, max_work),
            max_queue_delay_s=max_queue_delay_s,
            preferred=preferred_batch_size,
            target_batch_s=target_batch_s,
        )
        self._max_rows = self._policy.limits.max_rows
        self._max_work = max_work
        # Other policies take no notice of preferred sizes, so none of their batches closes for one.
        self._preferred = frozenset(preferred_batch_size if policy == "window" else ())
        self._max_queue_size = max_queue_size
        self._queue_policies = queue_policies or QueuePolicies()
        self._is_open = self._queue_policies.is_open
        self._queue = DeadlineQueue()
        self._delays: list[
            tuple[float, int]
        ] = []  # a heap of (instant of losing its place, id); may hold items that left
        self.closed_by = ""  # why the last batch held no more: full, preferred, delay, deadline, shape, idle
        self.due_at = -inf  # since when the last batch could have left: its last member was here, and no delay held it
        self._sharing_ratio = 1.0  # what batches cost, as a share of what their members would cost alone; decayed

    def add(self, items: Sequence[QueueItem], now: float, *, readmit: bool = False) -> list[QueueItem]:
        """Queue all parts of one request, or none; as they were queued, maybe at a lower level of priority.

        Args:
            readmit: the items were here before and go back (their batch failed), so the queue's size does not count,
                and they are not counted as arrivals again.

        Raises:
            Overloaded: the queue is full; `retry_after_s` is when it should have drained.
            DeadlineExceeded: the request is provably too late.
        """
        if not readmit:
            items = self._placed(items)
        entries = [self._entry(item, timed=not readmit) for item in items]
        least_s = EARLY_DROP_RATIO * sum([entry.alone_s for entry in entries])
        left_s = min([item.deadline for item in items]) - now
        if least_s >= left_s:
            raise DeadlineExceeded(
                f"{max(left_s, 0.0) * 1e3:.0f} ms are left, but this takes at least {least_s * 1e3:.0f} ms"
            )
        for entry in entries:
            self._queue.add(entry)
            if not readmit:  # a readmitted item was counted as an arrival, and timed, before
                self._policy.came(entry, now)
                self._time(entry.item)
        return list(items)

    def limit_work(self, units: float, bytes_of: Callable[[float], float] | None = None) -> None:
        """Limit a batch to this much work from now on, and never more than `max_work`: memory may be short.

        Args:
            bytes_of: predicts the memory of so much work; what a batch is worth is then measured by its bytes too.
        """
        by_memory = bytes_of if units < self._max_work else None
        self._policy.limits = BatchLimits(self._policy.limits.max_rows, min(units, self._max_work), bytes_of=by_memory)

    def remove(self, ids: Sequence[int]) -> None:
        """Take out the items of `ids` that still wait: their caller has left."""
        for id in ids:
            self._queue.take(id)

    def expire(self, now: float) -> list[QueueItem]:
        """Take out and return the items that are provably too late."""
        return [entry.item for entry in self._queue.take_infeasible(now)]

    def release(self, now: float, *, early: bool = False) -> list[QueueItem]:
        """The batch to run now, in order; empty when there is none yet. Call it when a worker is free.

        Args:
            early: the batch is prepared for a worker that is about to be free, so there is one only if other requests
                stay in the queue: otherwise a request that arrives in that moment could still join it.
        """
        chosen = self._choose(now)
        if not chosen or self._policy.held_until(chosen) > now or (early and len(chosen) == len(self._queue)):
            return []
        batch_s = batch_seconds(self._cost, [entry.item.shape for entry in chosen])
        self.closed_by = self._closed_by(chosen)
        self.due_at = self._due_at(chosen)
        self._learn_sharing(chosen, batch_s)
        self._policy.left(chosen, batch_s, waiting=len(self._queue) - len(chosen))
        self.remove([entry.item.id for entry in chosen])
        return [entry.item for entry in chosen]

    def took(self, batch_s: float) -> None:
        """Record that a batch of this batcher has been computed, in `batch_s` seconds."""
        self._policy.took(batch_s)

    def next_wake(self, now: float, *, worker_free: bool = True) -> float | None:
        """When to call `expire`, or with a free worker `release`, again; None while the queue is empty.

        A batch that is due already waits for something else than time (memory, a worker that rests): for an instant in
        the past the caller would only call again and again.
        """
        infeasible_at = self._queue.next_infeasible_at
        if infeasible_at is None:
            return None
        chosen = self._choose(now) if worker_free and self._policy.holds_back else []
        held_until = self._policy.held_until(chosen) if chosen else inf
        return min(infeasible_at, held_until) if held_until > now else infeasible_at

    def shared_by(self, workers: int) -> None:
        """Set how many workers feed from this queue: what waits is done in that many parts at once."""
        self._policy.workers = workers

    def cap_rows(self, ratio: float) -> None:
        """Limit batches to this part of `max_rows` from now on, and to at least one row."""
        self._policy.limits = replace(self._policy.limits, max_rows=max(1, int(self._max_rows * ratio)))

    @property
    def timed_size(self) -> int:
        """Instants at which an item loses its place, including those of items that left; bounded like the queue."""
        return len(self._delays)

    @property
    def head_key(self) -> float:
        """The key of the first item in order; infinity when the queue is empty."""
        first = self._queue.first
        return first.key if first is not None else inf

    def ahead(self, key: float) -> tuple[int, float]:
        """How many items wait before an order key, and the seconds that they should take."""
        count, seconds = self._queue.before(key)
        return count, self._sharing_ratio * seconds

    def drain_s(self) -> float:
        """Predicted seconds until every waiting item has been computed."""
        return self._sharing_ratio * self._queue.total_s

    def waiting(self) -> list[QueueItem]:
        """All waiting items, in order."""
        return [entry.item for entry in self._queue]

    def __len__(self) -> int:
        return len(self._queue)

    def __repr__(self) -> str:
        return f"<Batcher {len(self)}/{self._max_queue_size} waiting, drained in {self.drain_s() * 1e3:.0f} ms>"

    def _placed(self, items: Sequence[QueueItem]) -> Sequence[QueueItem]:
        """The items at a level that has room; Overloaded for a full queue or level."""
        waiting, priority = len(self._queue), items[0].priority
        if waiting and waiting + len(items) > self._max_queue_size:
            raise self._full(f"{waiting} of {self._max_queue_size} wait")
        if self._is_open or self._has_room(priority, len(items)):
            return items
        lower = self._queue_policies.fallback_levels(priority)
        level = next((level for level in lower if self._has_room(level, len(items))), None)
        if level is None:
            at_level, room = self._queue.at_level(priority), self._queue_policies.room(priority)
            raise self._full(f"{at_level} of {room:g} wait at this level of priority")
        return [replace(item, priority=level) for item in items]

    def _has_room(self, priority: int, count: int) -> bool:
        """Whether so many more may wait at this level; an empty one takes one request of any size."""
        at_level = self._queue.at_level(priority)
        return not at_level or at_level + count <= self._queue_policies.room(priority)

    def _full(self, why: str) -> Overloaded:
        low, high = RETRY_AFTER_RANGE_S
        return Overloaded(f"the queue is full: {why}", retry_after_s=min(max(self.drain_s(), low), high))

    def _entry(self, item: QueueItem, *, timed: bool) -> QueueEntry:
        alone_s = self._cost.predict_s(item.shape.units, item.shape.length)
        infeasible_at = item.deadline - EARLY_DROP_RATIO * alone_s
        return QueueEntry(
            item,
            item.key,
            alone_s,
            min(infeasible_at, self._queue_policies.rejected_at(item))
            if timed and not self._is_open
            else infeasible_at,
        )

    def _time(self, item: QueueItem) -> None:
        """Note when the item loses its place; entries of items that left are dropped once they are the majority."""
        if self._is_open:
            return
        if (delayed_at := self._queue_policies.delayed_at(item)) < inf:
            heappush(self._delays, (delayed_at, item.id))
        if len(self._delays) > 2 * len(self._queue) + SLACK:
            self._delays = [(at, id) for at, id in self._delays if id in self._queue]
            heapify(self._delays)

    def _delay(self, now: float) -> None:
        """Move each item that has waited too long to keep its place behind every item that waits now."""
        while self._delays and self._delays[0][0] <= now:
            entry = self._queue.take(heappop(self._delays)[1])
            if entry is not None:
                key = max(entry.key + LEVEL_S, nextafter(self._queue.last_key, inf))
                self._queue.add(replace(entry, key=key, delayed=True))

    def _choose(self, now: float) -> list[QueueEntry]:
        """The next batch, held back or not; infeasible items are in none."""
        self._delay(now)
        alive = (entry for entry in self._queue if entry.infeasible_at > now)
        head = next(alive, None)
        if head is None:
            return []
        mates = (entry for entry in islice(alive, _SCANNED) if _may_share(entry, head))
        return self._policy.choose([head, *islice(mates, WINDOW - 1)], now)

    def _closed_by(self, chosen: Sequence[QueueEntry]) -> str:
        """Why the batch holds no more items.

        `full`: nothing more fits. `preferred`: a size that does not wait. `shape`: the waiting items are better off in
        another batch. `delay`, `deadline`: it was held back for batch-mates, until its time was over. `idle`: a worker
        was free, and nothing else waited.
        """
        rows = sum(entry.item.shape.rows for entry in chosen)
        if rows >= self._policy.limits.max_rows:
            return "full"
        if rows in self._preferred:
            return "preferred"
        if len(chosen) < len(self._queue):
            return "shape"
        held_until = self._policy.held_until(chosen)
        if held_until == -inf:
            return "idle"
        oldest_at = min(entry.item.arrived_at for entry in chosen)
        return "delay" if held_until >= oldest_at + self._policy.delay_s else "deadline"

    def _due_at(self, chosen: Sequence[QueueEntry]) -> float:
        """Since when the batch could have left; one that was held back, since its time was over."""
        held_until = self._policy.held_until(chosen) if self.closed_by in ("delay", "deadline") else -inf
        return max(held_until, *(entry.item.arrived_at for entry in chosen))

    def _learn_sharing(self, chosen: Sequence[QueueEntry], batch_s: float) -> None:
        # An exponential average of what a batch costs, as a share of its members' costs alone; never over 1.
        ratio = batch_s / sum(entry.alone_s for entry in chosen)
        self._sharing_ratio += _SHARING_WEIGHT * (min(ratio, 1.0) - self._sharing_ratio)


def _may_share(entry: QueueEntry, head: QueueEntry) -> bool:
    """Whether an entry may share the head's batch; one that lost its place joins only a head that lost its own."""
    alike = entry.item.kind == head.item.kind and entry.item.cohort == head.item.cohort
    return alike and (head.delayed or not entry.delayed)

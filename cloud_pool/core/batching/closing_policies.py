"""A batching policy chooses which waiting requests form the next batch, and how long that may be held back.

    deadline   groups of like lengths, chosen by deadlines, value and expected arrivals (`grouping.py`,
               `cloud_pool/core/sharing/batch_choice.py`, `arrival_rate.py`); starts at once, unless `max_queue_delay_s`
               allows to wait and batch-mates are expected within that time
    eager      the first in order with the ones after it, whatever their lengths, as soon as the device is free
    window     the same, but a partial batch waits for batch-mates up to `max_queue_delay_s` after its oldest member
               came; one of a `preferred_batch_size` does not (Triton's dynamic batcher)
    adaptive   a window that is learned: it starts at 50 ms, is adjusted after every 10 batches, and stays within 10 and
               100 ms. Batches slower than `target_batch_s` by a fifth shorten it, because a smaller batch computes for
               less time; others lengthen it, by the more the fuller the batches are and the more requests wait
    none       one request a call

All but the first exist for comparison: padding to the longest makes eager batches of mixed lengths
collapse on a CPU, and a window that waits beside an idle device only adds to the answer.

Invariants, for every policy: rows and work within the limits, except for a single request that is over them alone;
kinds and cohorts are not mixed; an infeasible request is in no batch; the deadline of a member never passes while a
batch is held back, by prediction.

Source: Triton's dynamic batcher (docs/design/batching.md, "Policies to compare with"); docs/design/numbers.md,
"Batching servers".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, Protocol

from msgspec.structs import replace

from cloud_pool.core.batching.arrival_rate import ArrivalRate
from cloud_pool.core.batching.batch_cost import BatchCost
from cloud_pool.core.batching.deadline_queue import QueueEntry
from cloud_pool.core.batching.grouping import BatchLimits, batch_seconds, cheapest_groups, padded_shape
from cloud_pool.core.batching.queue_item import FAR_S
from cloud_pool.core.sharing.batch_choice import BatchCandidate, next_candidate
from tidegate.models.manifest import TARGET_BATCH_S, BatchingPolicy
from tidegate.priority import WEIGHTS, level_of

ROOM_RATIO: Final = 0.5  # share of a member's slack that its batch may take; the rest is for errors and the way back
GUARD_RATIO: Final = 0.3  # share of its whole budget that a request keeps as slack when another goes before it
GUARD_S: Final = 0.010
# A batch lets others of equal worth pass until it has waited so many times what it computes, however late it is due:
# with 64 patient callers that send the next request when they are answered, long batches otherwise waited for ever, and
# alone at last held 0.84 of the limit and not 0.94. Replayed with 1, 3 and 7: with 1 short ones wait for long ones, 7
# is no better.
PASSED_CALLS: Final = 3.0
LEAST_BATCH_MATES: Final = 0.5  # where fewer are expected within the delay, waiting for them costs more than it gains
BLOCKING_RATIO: Final = 0.5  # share of the slack of tight requests (`tight_s`) that a batch before them may take
_SMOOTHING: Final = 0.2
_SURE: Final = 0.95  # a batch is held back only while this share of such batches would still be in time
_STEP_RATIO: Final = 0.3
_FEWEST_CALLS: Final = (
    4.0  # a batch may always take as long as this many of the cheapest calls, or it would be split for nothing
)


class BatchPolicy(Protocol):
    """The policy interface of a batcher. `limits` of a batch and `workers` of the queue may change at any time."""

    limits: BatchLimits
    workers: int

    @property
    def holds_back(self) -> bool:
        """Whether the policy ever holds a batch back."""

    @property
    def delay_s(self) -> float:
        """How long the policy now holds a batch back at most, in seconds."""

    def came(self, entry: QueueEntry, now: float) -> None:
        """Record that a request has joined the queue."""

    def choose(self, candidates: Sequence[QueueEntry], now: float) -> list[QueueEntry]:
        """The batch to run next, out of entries of one kind in order, at least one."""

    def held_until(self, chosen: Sequence[QueueEntry]) -> float:
        """Until when the batch may wait for batch-mates; in the past when it should not wait."""

    def left(self, chosen: Sequence[QueueEntry], batch_s: float, *, waiting: int) -> None:
        """Record that a batch has left, with its predicted seconds, and how many items stay in the queue."""

    def took(self, batch_s: float) -> None:
        """Record the seconds that a batch took."""


class DeadlinePolicy:
    """The default: by cost and deadlines."""

    def __init__(self, cost: BatchCost, limits: BatchLimits, max_queue_delay_s: float) -> None:
        self._cost = cost
        self.limits = limits
        self.workers = 1
        self._delay_s = max_queue_delay_s
        self._demand = ArrivalRate()
        self._sharing_ratio = 1.0

    @property
    def holds_back(self) -> bool:
        return self._delay_s > 0.0

    @property
    def delay_s(self) -> float:
        return self._delay_s

    def came(self, entry: QueueEntry, now: float) -> None:
        slack_s = entry.item.deadline - now - entry.alone_s
        self._demand.record(self._sharing_ratio * entry.alone_s, slack_s, now)

    def choose(self, candidates: Sequence[QueueEntry], now: float) -> list[QueueEntry]:
        if len(candidates) == 1:
            return list(candidates)
        # A batch cannot be interrupted: it takes at most a share of the slack that a tight arrival would have.
        blocking_s = max(BLOCKING_RATIO * self._demand.tight_s, _FEWEST_CALLS * self._cost.predict_s(0.0, 1.0))
        limits = replace(self.limits, max_s=blocking_s)
        shapes = [entry.item.shape for entry in candidates]
        # Memory is short where what waits here would not fit at once.
        bytes_of = limits.bytes_of if sum(shape.units for shape in shapes) > limits.max_work else None
        rooms_s = [_room_s(entry, now) for entry in candidates]
        groups = [
            self._group(candidates, run, bytes_of) for run in cheapest_groups(shapes, self._cost, limits, rooms_s)
        ]
        if now - candidates[0].item.arrived_at > FAR_S:  # the first in order has waited long enough
            turn = next(group for group in groups if 0 in group.members)
        else:
            turn = next_candidate(groups, now, self._demand.stretch(now, self.workers))
        return [candidates[index] for index in turn.members]

    def held_until(self, chosen: Sequence[QueueEntry]) -> float:
        if self._demand.rate * self._delay_s < LEAST_BATCH_MATES:
            return -inf
        return _held_until(chosen, self._delay_s, self.limits.max_rows, self._cost)

    def left(self, chosen: Sequence[QueueEntry], batch_s: float, *, waiting: int) -> None:
        ratio = min(1.0, batch_s / sum(entry.alone_s for entry in chosen))
        self._sharing_ratio += _SMOOTHING * (ratio - self._sharing_ratio)

    def took(self, batch_s: float) -> None:
        """Ignored: the cost model learns this already, and the policy reads the cost model."""

    def _group(
        self, candidates: Sequence[QueueEntry], run: Sequence[int], bytes_of: Callable[[float], float] | None
    ) -> BatchCandidate:
        members = [candidates[index].item for index in run]
        shape = padded_shape([item.shape for item in members])
        batch_s = self._cost.predict_s(shape.units, shape.length)
        oldest_at = min([item.arrived_at for item in members])
        return BatchCandidate(
            members=tuple(run),
            cost_s=batch_s,
            due_at=min([item.deadline for item in members]),
            weight=sum([WEIGHTS[level_of(item.priority)] for item in members]),
            guard_s=GUARD_S + GUARD_RATIO * min([item.deadline - item.arrived_at for item in members]),
            held_bytes=1.0 if bytes_of is None else max(1.0, bytes_of(shape.units)),
            patient_until=oldest_at + PASSED_CALLS * batch_s,
        )

    def __repr__(self) -> str:
        return f"<DeadlinePolicy {self._demand!r}>"


class WindowPolicy:
    """The first requests in order form the batch: `eager` with no delay, `window` with one.

    Args:
        preferred: rows of batches that need not wait for more; empty: only full batches need not wait.
    """

    def __init__(
        self, cost: BatchCost, limits: BatchLimits, max_queue_delay_s: float, preferred: Sequence[int] = ()
    ) -> None:
        self._cost = cost
        self.limits = limits
        self.workers = 1
        self._delay_s = max_queue_delay_s
        self._preferred = frozenset(preferred)

    @property
    def holds_back(self) -> bool:
        return self._delay_s > 0.0

    @property
    def delay_s(self) -> float:
        return self._delay_s

    def came(self, entry: QueueEntry, now: float) -> None:
        """Ignored: only the waiting requests count."""

    def choose(self, candidates: Sequence[QueueEntry], now: float) -> list[QueueEntry]:
        """As many as fit; before the delay is over, only up to the largest preferred size if there is one."""
        fitting = _fitting(candidates, self.limits)
        preferred = [count for count, rows in _rows_by_count(fitting) if rows in self._preferred]
        over = now >= min(entry.item.arrived_at for entry in fitting) + self._delay_s
        return fitting if over or not preferred else fitting[: preferred[-1]]

    def held_until(self, chosen: Sequence[QueueEntry]) -> float:
        if sum(entry.item.shape.rows for entry in chosen) in self._preferred:
            return -inf
        return _held_until(chosen, self._delay_s, self.limits.max_rows, self._cost)

    def left(self, chosen: Sequence[QueueEntry], batch_s: float, *, waiting: int) -> None:
        """Ignored: costs play no part."""

    def took(self, batch_s: float) -> None:
        """Ignored: the window is fixed."""

    def __repr__(self) -> str:
        return f"<WindowPolicy {self._delay_s * 1e3:.0f} ms>"


class AdaptivePolicy(WindowPolicy):
    """A window that keeps batches near a target: shorter while they compute for too long, and else longer.

    Args:
        target_s: seconds that a batch should take to compute.
    """

    START_S: Final = 0.050
    LEAST_S: Final = 0.010
    MOST_S: Final = 0.100
    EVERY: Final = 10  # batches
    SLOW_RATIO: Final = 1.2  # of the target: what is within a fifth of it is noise, and no reason to shorten

    def __init__(self, cost: BatchCost, limits: BatchLimits, target_s: float) -> None:
        super().__init__(cost, limits, self.START_S)
        self._target_s = target_s
        self._batches = 0
        self._smoothed_s: float | None = None  # what batches took, the last ones most
        self._backlog_ratio = 0.0  # smoothed: the requests of a batch and those that stayed, as a share of a full one

    def left(self, chosen: Sequence[QueueEntry], batch_s: float, *, waiting: int) -> None:
        rows = sum(entry.item.shape.rows for entry in chosen)
        ratio = min(1.0, (rows + waiting) / self.limits.max_rows)
        self._backlog_ratio += _SMOOTHING * (ratio - self._backlog_ratio)

    def took(self, batch_s: float) -> None:
        before_s = batch_s if self._smoothed_s is None else self._smoothed_s
        self._smoothed_s = before_s + _SMOOTHING * (batch_s - before_s)
        self._batches += 1
        if self._batches == self.EVERY:
            self._batches = 0
            self._adjust(self._smoothed_s)

    def _adjust(self, smoothed_s: float) -> None:
        # A lone caller's batches are fast and nearly empty: for such the window hardly grows, as waiting gains nothing.
        slow = smoothed_s > self.SLOW_RATIO * self._target_s
        factor = 1.0 - _STEP_RATIO if slow else 1.0 + _STEP_RATIO * self._backlog_ratio
        self._delay_s = min(self.MOST_S, max(self.LEAST_S, factor * self._delay_s))

    def __repr__(self) -> str:
        return f"<AdaptivePolicy {self._delay_s * 1e3:.0f} ms>"


def policy_of(
    name: BatchingPolicy,
    cost: BatchCost,
    limits: BatchLimits,
    *,
    max_queue_delay_s: float = 0.0,
    preferred: Sequence[int] = (),
    target_batch_s: float = TARGET_BATCH_S,
) -> BatchPolicy:
    """The policy of this name."""
    match name:
        case "deadline":
            return DeadlinePolicy(cost, limits, max_queue_delay_s)
        case "adaptive":
            return AdaptivePolicy(cost, limits, target_batch_s)
        case "window":
            return WindowPolicy(cost, limits, max_queue_delay_s, preferred)
        case "eager":
            return WindowPolicy(cost, limits, 0.0)
        case "none":
            return WindowPolicy(cost, BatchLimits(1), 0.0)


def _room_s(entry: QueueEntry, now: float) -> float:
    """The longest batch that an entry may join; one that is late by prediction loses nothing by batch-mates."""
    slack_s = entry.item.deadline - now
    return ROOM_RATIO * slack_s if entry.alone_s <= slack_s else inf


def _fitting(candidates: Sequence[QueueEntry], limits: BatchLimits) -> list[QueueEntry]:
    """The first candidate, and the ones after it until one does not fit."""
    rows, cells, longest = 0, 0.0, 0
    for count, entry in enumerate(candidates):
        shape = entry.item.shape
        rows, cells, longest = rows + shape.rows, cells + shape.cells, max(longest, shape.length)
        if count and (rows > limits.max_rows or cells * longest > limits.max_work):
            return list(candidates[:count])
    return list(candidates)


def _rows_by_count(entries: Sequence[QueueEntry]) -> list[tuple[int, int]]:
    rows, found = 0, []
    for count, entry in enumerate(entries, 1):
        rows += entry.item.shape.rows
        found.append((count, rows))
    return found


def _held_until(chosen: Sequence[QueueEntry], delay_s: float, max_rows: int, cost: BatchCost) -> float:
    """The end of the delay since the oldest member came, or earlier; a full or an urgent batch does not wait."""
    if delay_s <= 0.0 or sum(entry.item.shape.rows for entry in chosen) >= max_rows:
        return -inf
    oldest_at = min(entry.item.arrived_at for entry in chosen)
    batch_s = batch_seconds(cost, [entry.item.shape for entry in chosen])
    due_at = min(entry.item.deadline for entry in chosen)
    return min(oldest_at + delay_s, due_at - batch_s * max(1.0, cost.quantile(_SURE)))

"""Length-aware grouping partitions requests into padded batches so that all of them together cost least.

Padding makes every row as long as the longest, and a padded token costs what a real one does. On a device where cost
grows with tokens, joining all waiting requests therefore collapses: the longer the queue, the bigger the batch, the
longer its longest row, 27 answers a second where one at a time gives 114 (docs/design/numbers.md, "Batching servers").
What a batch saves is the fixed part of each call. So a row joins exactly when the padding that it brings costs less
than the calls that it saves, by the device's own measured table: a CPU gets small groups of like lengths, a GPU with a
flat table large mixed ones, from the same rule.

Method: rows sorted by length; with the cost of a group depending only on its cells and its longest row, an optimal
partition is made of contiguous runs, found by dynamic programming over run ends, best[j] = min over i of best[i] +
cost(run i..j). Growing a run stops early once a row adds more than it costs alone, since still shorter rows only do
worse. Which group runs is decided elsewhere (`cloud_pool/core/sharing/batch_choice.py`); the rest is planned again next
time, together with new arrivals.

Invariants: each request is in one group; rows, padded work and seconds stay within the limits, except for a single
request that is over them on its own; a call with at most WINDOW requests takes a millisecond at most, and less where
all are alike (`_size_of_alike`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from operator import add
from typing import Final

import msgspec
import numpy as np

from cloud_pool.core.batching.batch_cost import BatchCost, Numbers

WINDOW = 64
_LEAST: Final = 1e-9  # units of work; a request may be said to have none
_ROUNDING: Final = 1e-9  # of a request's seconds: a difference that is none


class WorkShape(msgspec.Struct, frozen=True, gc=False):  # hot: a frozen dataclass takes five times as long to make
    """A request as grouping sees it: rows, their common length, and the work of all rows unpadded."""

    rows: int
    length: int
    units: float

    @property
    def cells(self) -> float:
        """Work per unit of length: stretched to length L, the request is `cells · L` units."""
        return self.units / self.length


class BatchLimits(msgspec.Struct, frozen=True):
    """Limits of one group: rows, padded work, and seconds.

    `bytes_of` predicts the memory of so much work, where it is memory that limits the work now.
    """

    max_rows: int
    max_work: float = inf
    max_s: float = inf
    bytes_of: Callable[[float], float] | None = None


def padded_shape(shapes: Sequence[WorkShape]) -> WorkShape:
    """The shape of a batch whose rows are all padded to the longest."""
    longest = max([shape.length for shape in shapes])
    cells = sum([shape.units / shape.length for shape in shapes])
    return WorkShape(sum([shape.rows for shape in shapes]), longest, longest * cells)


def batch_seconds(cost: BatchCost, shapes: Sequence[WorkShape]) -> float:
    """Predicted seconds of these requests in one batch."""
    batch = padded_shape(shapes)
    return cost.predict_s(batch.units, batch.length)


def cheapest_groups(
    shapes: Sequence[WorkShape],
    cost: BatchCost,
    limits: BatchLimits,
    rooms_s: Sequence[float] | None = None,
) -> list[list[int]]:
    """Partition requests into batches so that all together cost least: indices of `shapes`, each in one group.

    Args:
        shapes: in the order of their turns; it decides which is left over from a full batch. At most WINDOW are cheap.
        rooms_s: for each, the most seconds of a batch that it may share; alone it may take longer.
    """
    if len(shapes) == 1:
        return [[0]]
    if (size := _size_of_alike(shapes, cost, limits, rooms_s)) is not None:
        return [list(range(at, min(at + size, len(shapes)))) for at in range(0, len(shapes), size)]
    # Among equal lengths those whose turn is first come last: runs are filled up from the end, so what does not fit
    # into a full batch is left over from the requests that can wait.
    order = sorted(range(len(shapes)), key=lambda index: (shapes[index].length, -index))
    rooms_s = [limits.max_s] * len(shapes) if rooms_s is None else [min(room_s, limits.max_s) for room_s in rooms_s]
    starts = _cheapest_runs([shapes[index] for index in order], cost, limits, [rooms_s[index] for index in order])
    groups: list[list[int]] = []
    last = len(starts) - 1
    while last >= 0:
        groups.append(sorted(order[starts[last] : last + 1]))
        last = starts[last] - 1
    return groups


def _size_of_alike(
    shapes: Sequence[WorkShape], cost: BatchCost, limits: BatchLimits, rooms_s: Sequence[float] | None
) -> int | None:
    """The size of all groups but the last where full ones are cheapest; None where that takes a plan.

    Where all requests are alike and each one more in a batch adds no more than the one before it (the cost is concave),
    two batches cost least when one of them is as full as can be: no plan is better than one of full batches and a rest.
    """
    first = shapes[0]
    if shapes.count(first) < len(shapes):
        return None
    most = max(1, int(min(len(shapes), limits.max_rows // first.rows, limits.max_work // max(first.units, _LEAST))))
    units = np.arange(1, most + 1) * first.units
    run_s = cost.predict_many_s(units, np.full(most, float(first.length))).tolist()
    size, alone_s, step_s = 1, run_s[0], inf
    for seconds, before_s in zip(run_s[1:], run_s, strict=False):
        adds_s = seconds - before_s
        if seconds > limits.max_s or adds_s > alone_s:
            break
        if adds_s > step_s + _ROUNDING * alone_s:
            return None
        size, step_s = size + 1, min(step_s, adds_s)
    fits_all = rooms_s is None or size == 1 or run_s[size - 1] <= min(rooms_s)
    return size if fits_all else None


def _cheapest_runs(
    ordered: Sequence[WorkShape], cost: BatchCost, limits: BatchLimits, rooms_s: Sequence[float]
) -> list[int]:
    """For each index as the end of a run, where that run starts in the cheapest partition up to there."""
    run_s, longest = _runs(ordered, cost, limits, np.array(rooms_s))
    best_s = [0.0]
    starts: list[int] = []
    for end, (seconds, most) in enumerate(zip(run_s.tolist(), longest.tolist(), strict=True)):
        # best_s[i] is the cost of the cheapest partition of the first i rows; a last run from i to `end` adds its own.
        first = end + 1 - most
        totals_s = list(map(add, best_s[first:], reversed(seconds[:most])))
        least_s = min(totals_s)
        best_s.append(least_s)
        starts.append(first + totals_s.index(least_s))  # on a tie the larger group: fewer calls
    return starts


def _runs(
    ordered: Sequence[WorkShape], cost: BatchCost, limits: BatchLimits, rooms_s: Numbers
) -> tuple[Numbers, Numbers]:
    """Seconds of each run, [end, how many before it]; and for each end, how many in a run are worth looking at."""
    most = min(len(ordered), limits.max_rows)
    # Row `end`, column k: the run of k + 1 requests that ends at `end`; its length is that of the request at `end`.
    starts = np.arange(len(ordered))[:, None] - np.arange(most)
    at = np.maximum(starts, 0)
    lengths = np.array([[float(shape.length)] for shape in ordered])
    rows, cells = _sums([shape.rows for shape in ordered], at), _sums([shape.cells for shape in ordered], at)
    units = cells * lengths
    run_s = cost.predict_many_s(units, lengths)
    room_s = np.minimum.accumulate(rooms_s[at], axis=1)
    barred = (starts < 0) | (rows > limits.max_rows) | (units > limits.max_work) | (run_s > room_s)
    # A run stops growing once the next request adds more than it costs alone.
    barred[:, 1:] |= np.diff(run_s, axis=1) > run_s[:, 0][at[:, 1:]]
    barred[:, 0] = False  # alone each request may run, whatever the limits
    return run_s, np.where(barred.any(axis=1), barred.argmax(axis=1), most)


def _sums(numbers: Sequence[float], starts: Numbers) -> Numbers:
    """From each start to the end that its row stands for, both included."""
    until = np.concatenate(([0.0], np.cumsum(numbers)))
    sums: Numbers = until[1:, None] - until[starts]
    return sums

"""Length-aware groups: who should share a padded batch with whom, so that all together cost least.

Padding makes every row as long as the longest, and a padded token costs what a real one does. On a device where
cost grows with tokens, joining whoever waits therefore collapses: the longer the queue, the bigger the batch, the
longer its longest row, 27 answers a second where one at a time gives 114 (`reference/numbers.md`, part 2). What a
batch saves is the fixed part of each call. So a row joins exactly when the padding that it brings costs less than
the calls that it saves, by the device's own measured table: a CPU gets small groups of like lengths, a GPU with a
flat table large mixed ones, from the same rule.

Method: rows sorted by length; with the cost of a group depending only on its cells and its longest row, an optimal
partition is made of contiguous runs, found by dynamic programming over run ends, best[j] = min over i of best[i] +
cost(run i..j). Growing a run stops early once a row adds more than it costs alone, since still shorter rows only do
worse. The group of the head, the request whose turn it is, is the answer; the rest is planned again next time, with
whoever has come meanwhile.

Invariants: the head is in the group; rows and padded work stay within the limits, but for a single request that is
over them on its own; at most WINDOW requests are looked at, so a decision costs a millisecond at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

WINDOW = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """What grouping sees of a request: rows, their common length, and the work of all of them unpadded."""

    rows: int
    length: int
    units: float

    @property
    def cells(self) -> float:
        """Work per unit of length: stretched to length L, the request is `cells · L` units."""
        return self.units / self.length


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one group: rows, padded work, and the seconds after which the head would be late."""

    max_rows: int
    max_work: float = inf
    max_s: float = inf


def padded_units(shapes: Sequence[Shape]) -> float:
    """The work of a batch whose rows are all padded to the longest."""
    return max(shape.length for shape in shapes) * sum(shape.cells for shape in shapes)


def group_of_head(shapes: Sequence[Shape], service_s: Callable[[float], float], limits: Limits) -> list[int]:
    """The indices of those that should share a batch with `shapes[0]`, the head, itself included; ascending.

    Args:
        shapes: the head first, then the others in the order of their turns; those past WINDOW are left for later.
        service_s: seconds that one call of so many units takes.
    """
    # Among equal lengths those whose turn is first come last: runs are filled up from the end, so what does not fit
    # into a full batch is left over from those who can wait.
    order = sorted(range(min(len(shapes), WINDOW)), key=lambda index: (shapes[index].length, -index))
    ordered = [shapes[index] for index in order]
    run_starts = _cheapest_runs(ordered, service_s, limits)
    first, last = _run_with(order.index(0), run_starts)
    return sorted(order[first : last + 1])


def _cheapest_runs(ordered: Sequence[Shape], service_s: Callable[[float], float], limits: Limits) -> list[int]:
    """For each index as the end of a run, where that run starts in the cheapest partition up to there."""
    alone_s = [service_s(shape.units) for shape in ordered]
    best_s, starts = [0.0], list[int]()
    for end, longest in enumerate(ordered):
        rows, cells, run_s = longest.rows, longest.cells, alone_s[end]
        total_s, start = best_s[end] + run_s, end
        for first in range(end - 1, -1, -1):
            rows, cells = rows + ordered[first].rows, cells + ordered[first].cells
            units = cells * longest.length
            grown_s = service_s(units)
            if rows > limits.max_rows or units > limits.max_work or grown_s > limits.max_s:
                break
            if grown_s - run_s > alone_s[first]:
                break
            run_s = grown_s
            if best_s[first] + run_s <= total_s:  # on a tie the larger group: fewer calls
                total_s, start = best_s[first] + run_s, first
        best_s.append(total_s)
        starts.append(start)
    return starts


def _run_with(index: int, starts: Sequence[int]) -> tuple[int, int]:
    """First and last index of the run that holds `index`."""
    last = len(starts) - 1
    while starts[last] > index:
        last = starts[last] - 1
    return starts[last], last

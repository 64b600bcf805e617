"""A histogram that costs a bisection an observation, and remembers a trace for each of its buckets.

Counting and scraping happen on one event loop, so plain integers do: the client library's own histogram takes a lock
and walks its buckets. Exemplars are set by those few requests whose trace is kept; each bucket keeps its newest, which
is how a spike on a graph leads to a trace that is in it.

Pure. Bounds follow one rule: 1-2-5 steps in base units, so that histograms of different processes can be summed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

DURATIONS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
STAGES_S: Final = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# Both sides of nothing: a slack, where late is negative, or an error, where too optimistic is positive.
SIGNED_S: Final = (-5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ERRORS_S: Final = (
    -1.0,
    -0.5,
    -0.2,
    -0.1,
    -0.05,
    -0.02,
    -0.01,
    -0.005,
    0.0,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
)
ROWS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Exemplar(NamedTuple):
    """One observation with the trace that it belongs to; `utc_s` is when."""

    value: float
    trace_id: str
    utc_s: float


class Histogram:
    """Counts by upper bound. Mutable: `observe`, and `exemplify` what was observed."""

    __slots__ = ("_counts", "_exemplars", "bounds", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def exemplify(self, exemplar: Exemplar) -> None:
        """Remember the trace of an observation; the newest of each bucket is kept."""
        self._exemplars[bisect_left(self.bounds, exemplar.value)] = exemplar

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts with their upper bounds, as Prometheus prints them."""
        running, rows = 0, []
        for bound, hits in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            running += hits
            rows.append((bound, float(running)))
        return rows

    def exemplars(self) -> Sequence[Exemplar | None]:
        """By bucket, in the order of `buckets`."""
        return [self._exemplars.get(place) for place in range(len(self._counts))]

    def __repr__(self) -> str:
        return f"<Histogram {self.count} values>"

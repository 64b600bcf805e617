"""Answer times are how long whole answers of a size have lately taken, from the request to its answer.

A target of our own promises each answer by its accept-ack. A foreign server promises nothing, and what is predicted of
it begins with a prior that is too dear on purpose: with that for a promise, its silence was never overdue before a
hedge had answered. What it has shown is its promise here: the 99th percentile of its own answers of that size, with
whatever they waited for, be it the way, a queue or larger requests ahead.

Sizes are powers of two of the work units. The latest `MOST` answers of each are kept, of the last `MEMORY_S` seconds,
and the latest `FEWEST` however old. The percentile is of values that were seen and of no distribution: a server with a
long tail has it in there. A size that has too few takes the next larger one's for its bound, and where there is none
the next smaller one's, times as much as it is larger.

It can be wrong where a server's times change by more than the watchdog's ratio between two answers of a size.
Invariants: at most 64 sizes; O(1) to record, O(MOST log MOST) for the first reading after an answer.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from tidegate.estimate.quantiles import nearest_rank

MOST: Final = 100  # of a size: so that the 99th percentile is not the longest once there are as many
FEWEST: Final = 5
MEMORY_S: Final = 60.0
_SIZES: Final = 64
_SHARE: Final = 0.98  # `nearest_rank` has 0 for its first place: of a hundred values, the second longest


class AnswerTimes:
    """Mutable: `record` each answer; `p99_s` is what 99 of 100 answers of a size take at most."""

    __slots__ = ("_p99_s", "_times")

    def __init__(self) -> None:
        self._times: dict[int, deque[tuple[float, float]]] = {}  # size → (when, how long) of its latest answers
        self._p99_s: dict[int, float] = {}  # of sizes without an answer since the last reading

    def record(self, units: float, took_s: float, now: float) -> None:
        """An answer to a request of `units` work came so long after the request was sent."""
        size = _size(units)
        times = self._times.get(size)
        if times is None:
            times = self._times[size] = deque(maxlen=MOST)
        times.append((now, took_s))
        while len(times) > FEWEST and times[0][0] < now - MEMORY_S:
            times.popleft()
        self._p99_s.pop(size, None)

    def p99_s(self, units: float) -> float | None:
        """Seconds that 99 of 100 answers of this size take at most; None while too few of any size are known."""
        wanted = _size(units)
        known = [size for size, times in self._times.items() if len(times) >= FEWEST]
        larger = min((size for size in known if size >= wanted), default=None)
        if larger is not None:
            return self._of(larger)
        smaller = max(known, default=None)
        return None if smaller is None else self._of(smaller) * 2.0 ** (wanted - smaller)

    def _of(self, size: int) -> float:
        p99_s = self._p99_s.get(size)
        if p99_s is None:
            p99_s = self._p99_s[size] = nearest_rank(sorted([took_s for _, took_s in self._times[size]]), _SHARE)
        return p99_s

    def __repr__(self) -> str:
        return f"<AnswerTimes of {sum(map(len, self._times.values()))} answers in {len(self._times)} sizes>"


def _size(units: float) -> int:
    """The power of two that the units reach."""
    return min(_SIZES - 1, max(0, int(units)).bit_length())

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
from typing import Final, NamedTuple

from gateway.core.estimate.link_estimate import BROKEN, SLACK_S
from tidegate.estimate.quantiles import nearest_rank

MOST: Final = 100  # of a size: so that the 99th percentile is not the longest once there are as many
FEWEST: Final = 5
MEMORY_S: Final = 60.0
_SIZES: Final = 64
_SHARE_BELOW: Final = 0.99
_SHARE: Final = 0.98  # `nearest_rank` has 0 for its first place: of a hundred values, the second longest


class UsualTime(NamedTuple):
    """What 99 of 100 answers of a size take at most, by so many answers."""

    p99_s: float
    answers: int

    @property
    def exceeded(self) -> float:
        """The chance that the next answer takes longer than this: Laplace's rule of succession, 1 in 100 at least."""
        return max(1.0 - _SHARE_BELOW, 1.0 / (self.answers + 1.0))

    def comes_after(self, silence_s: float) -> float:
        """The chance that an answer which has not come for so long still will.

        By Bayes' rule, as of a path's acks (`LinkEstimate.answers_after`): a server that works takes longer than this
        with the chance that its answers have shown, one that hangs always does. Beyond what was seen the tail is taken
        to fall with the square of time: heavier than a normal one, so that one slow answer is no proof.
        """
        beyond_s = silence_s - SLACK_S
        if beyond_s <= self.p99_s:
            return 1.0
        share = self.p99_s / beyond_s
        slower = self.exceeded * share * share
        return slower / (slower + BROKEN)


class AnswerTimes:
    """Mutable: `record` each answer; `usual` is what answers of a size take."""

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
        usual = self.usual(units)
        return None if usual is None else usual.p99_s

    def usual(self, units: float) -> UsualTime | None:
        """The same with the number of answers that it is known from."""
        wanted = _size(units)
        known = [size for size, times in self._times.items() if len(times) >= FEWEST]
        larger = min((size for size in known if size >= wanted), default=None)
        if larger is not None:
            return UsualTime(self._of(larger), len(self._times[larger]))
        smaller = max(known, default=None)
        if smaller is None:
            return None
        return UsualTime(self._of(smaller) * 2.0 ** (wanted - smaller), len(self._times[smaller]))

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

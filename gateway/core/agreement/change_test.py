"""A sequential test of change, by betting: when answers lie farther apart than this device's own did before.

The limit that a manifest leads to is twice what was recorded, since inputs differ from those of the measurement. A
fault whose mean lies a little above it takes hundreds of answers, and where only the largest class is compared,
thousands: an answer says one bit. How far apart both answers lie says more, and a device's own past what is usual.

So distances are learned, by slice of inputs: their mean, and how sure it is. The gamblers of `drift_test.py` bet that
they are now above

    usual = max(FACTOR · mean,  mean + √(2 · V · ln(2/δ) / n) + 7 · cap · ln(2/δ) / 3n,  floor)

the second of which is above the true mean, except with a chance of δ (Maurer and Pontil, 2009). The gamblers play over
all slices, each score against its own slice's `usual`. Distances count up to `cap`, so that one answer alone is none.

Each gambler keeps sums of the answers since it began to gain, and begins anew once what it gained is lost (CUSUM). So
what shows a change, and the mean score that is held against it, are of the same answers: inputs that were others for a
day leave a gambler with a small stake rich for days, and what another one has just begun to see is no mean.

A distance is learned once BLOCK to 2·BLOCK later ones have shown no change, so that a fault does not become usual while
it is being found. A drift so slow that it is learned is seen by the recorded limit only.

It can be wrong where inputs change within a slice, so it accuses nobody by itself: `agreement_watch.py` also asks that
the mean score since then is nearer to the limit than to what was recorded (`shown`).

Invariants: a device that has not been learned yet has no evidence; O(slices) memory, O(1) time a score.
Source: as `drift_test.py`; Maurer, Pontil, "Empirical Bernstein Bounds and Sample Variance Penalization", COLT 2009.
"""

from __future__ import annotations

from math import log, sqrt
from typing import Final

from gateway.core.agreement.drift_test import CEILING, FRACTIONS, bounded

FACTOR: Final = 1.5  # real texts of one length differ by their kind by up to 1.24 times their mean (docs/agreement.md)
BLOCK: Final = 200
_CAP: Final = 8.0  # limits
_DOUBT: Final = log(2.0 / 1e-3)  # ln(2/δ)
_MOST: Final = 1 << 16  # distances that a slice's past counts for; a week at the usual rate
_MOST_GAINED: Final = log(CEILING)


class _Distances:
    """Mutable: how many there were, their sum, and that of their squares."""

    __slots__ = ("count", "squares", "total")

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0.0, 0.0, 0.0

    def add(self, distance: float) -> None:
        self.count += 1.0
        self.total += distance
        self.squares += distance * distance

    def merge(self, other: _Distances) -> None:
        """Take in others; the older ones fade where there are more than enough."""
        fade = 0.5 if self.count > _MOST else 1.0
        self.count = fade * self.count + other.count
        self.total = fade * self.total + other.total
        self.squares = fade * self.squares + other.squares

    def usual(self, cap: float, floor: float) -> float:
        mean = self.total / self.count
        variance = max(0.0, self.squares / self.count - mean * mean)
        surely = mean + sqrt(2.0 * variance * _DOUBT / self.count) + 7.0 * cap * _DOUBT / (3.0 * self.count)
        return max(FACTOR * mean, surely, floor)


class ChangeTest:
    """Mutable: `record` answers; `evidence` is how rich the gamblers are on average.

    Args:
        limit: of the score, above 0; from it follows how much one distance may count.
        floor: a distance that is always usual, above 0.
    """

    __slots__ = ("_block", "_cap", "_count", "_floor", "_former", "_gamblers", "_past", "_usual")

    def __init__(self, limit: float, floor: float) -> None:
        self._cap = min(1.0, _CAP * limit)
        self._floor = floor
        self._gamblers = _gamblers()
        self._past: dict[int, _Distances] = {}
        self._usual: dict[int, float] = {}
        # Two blocks that are not learned yet, and how many distances the newer one has.
        self._former: dict[int, _Distances] = {}
        self._block: dict[int, _Distances] = {}
        self._count = 0

    def record(self, size: int, distance: float, score: float) -> float:
        """Take in an answer of the slice `size`; the evidence after it."""
        distance = min(bounded(distance), self._cap)
        usual = self._usual.get(size)
        if usual is not None:
            for gambler in self._gamblers:
                gambler.bet(distance / usual, score)
        self._learn(size, distance)
        return self.evidence

    @property
    def evidence(self) -> float:
        """In expectation at most the number of answers so far, while distances are as they were."""
        return sum(gambler.capital for gambler in self._gamblers) / len(self._gamblers)

    def shown(self, evidence: float, above: float) -> ChangeGambler | None:
        """The richest gambler that has so much evidence of a change and a mean score above `above`, if there is one."""
        if self.evidence < evidence:
            return None
        rich = (one for one in self._gamblers if one.capital >= evidence and one.mean > above)
        return max(rich, key=lambda one: one.capital, default=None)

    @property
    def usual_share(self) -> float:
        """The least `usual` of a slice, in parts of the most that a distance counts; below 1."""
        return min(0.9, min(self._usual.values(), default=self._floor) / self._cap)

    def share(self, size: int, distance: float) -> float | None:
        """A distance on a scale, from 0 to 1, on which `usual_share` is usual in each slice. None: it is not known."""
        usual = self._usual.get(size)
        return None if usual is None else min(bounded(distance), self._cap) / usual * self.usual_share

    def resume(self) -> None:
        """Begin to bet anew, with what was learned: what was not learned yet was since the change, and is forgotten."""
        self._gamblers = _gamblers()
        self._former, self._block, self._count = {}, {}, 0

    def _learn(self, size: int, distance: float) -> None:
        if size not in self._block:
            self._block[size] = _Distances()
        self._block[size].add(distance)
        self._count += 1
        if self._count < BLOCK:
            return
        for of, distances in self._former.items():
            if of not in self._past:
                self._past[of] = _Distances()
            self._past[of].merge(distances)
            self._usual[of] = self._past[of].usual(self._cap, self._floor)
        self._former, self._block, self._count = self._block, {}, 0

    def __repr__(self) -> str:
        usual = ", ".join(f"{size}: {one:.3g}" for size, one in sorted(self._usual.items()))
        return f"<ChangeTest {self.evidence:.3g} against {{{usual}}}>"


class ChangeGambler:
    """Mutable: how rich one gambler is, and sums of the answers since it began to gain."""

    __slots__ = ("_fraction", "_gained", "_scores", "_times", "capital", "count")

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self.capital = 0.0
        self._begin()

    def _begin(self) -> None:
        self.count, self._gained, self._scores, self._times = 0, 0.0, 0.0, 0.0

    def bet(self, times: float, score: float) -> None:
        """Take in an answer that lies so many times as far apart as is usual."""
        factor = 1.0 + self._fraction * (times - 1.0)
        self.capital = min(CEILING, (self.capital + 1.0) * factor)
        self._gained = min(_MOST_GAINED, self._gained + log(factor))
        self.count += 1
        self._scores += score
        self._times += times
        if self._gained <= 0.0:  # what is left of its capital is one for each answer so far at most
            self._begin()

    @property
    def mean(self) -> float:
        """The mean score since distances seem to have grown."""
        return self._scores / max(1, self.count)

    @property
    def times(self) -> float:
        """How far apart answers lie since then, in parts of what is usual."""
        return self._times / max(1, self.count)


def _gamblers() -> list[ChangeGambler]:
    return [ChangeGambler(fraction) for fraction in FRACTIONS]

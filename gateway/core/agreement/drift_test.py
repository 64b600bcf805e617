"""Two sequential tests of a mean: `DriftTest` says when answers disagree too much, `ReturnTest` when no longer.

A score is the disagreement of one shadowed answer, from 0 (the same) to 1 (nothing in common). How scores spread is not
known, differs from model to model, and is far from normal; what is known is the mean that was recorded when the variant
was made. So nothing but that mean is tested, by betting: a gambler stakes a fraction `f` of what it has on the next
score being above the limit `m`,

    L(x) = 1 + f · (x / m − 1)          E[L] ≤ 1 while E[x] ≤ m, whatever else is true of x ≥ 0

and so cannot expect to grow rich while answers agree. The gambler gets a new coin with every score, since nobody knows
when a device begins to fail (an e-detector of the Shiryaev-Roberts kind):

    M ← (M + 1) · L(x)                  E[M after n scores] ≤ n, hence P(M ≥ c within n scores) ≤ n / c

which is where a rate of false alarms comes from, without any assumption on the spread: `c` is the number of scores
within which one false alarm may be expected at most (Doob's inequality). Several fractions play side by side, each with
an equal part, so that slight drifts (small f) and gross ones (large f) are both found soon; their mean keeps the bound.

`ReturnTest` bets the other way while a device is demoted: that the mean is now below a level `q` that lies half-way to
what it was demoted for, and at least `_CLEAR` limits,

    M ← max(M, 1) · (1 + λ · (q − x))        E ≤ 1 for each factor while E[x] ≥ q

Scores of vectors are small and seldom reach far, so they are cut off at `cut` and counted in parts of it, which makes a
larger stake safe and a repair seen in some dozens of answers; one beyond the cut sets the test back to its beginning,
and from there it takes a run so long that a fault that shows in as many inputs as before would have broken it (with a
chance of 10⁻⁴). Scores that are all or nothing cannot be cut.

It can be wrong: the bound is for the mean that was recorded. Inputs on which an intact variant disagrees more than
`m` on average are alarms by right; `agreement_watch.py` tells them from a device's fault by the other devices.

Invariants: O(1) memory and time a score; a NaN or a score outside of [0, 1] counts as 1.
Source: Shin, Ramdas, Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", NEJSDS 2024;
Waudby-Smith, Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import fmean
from typing import Final

FRACTIONS: Final = (0.05, 0.15, 0.4, 0.8)
_CEILING: Final = 1e200  # far beyond every threshold, and far from infinity
_CLEAR: Final = 2.0  # limits
_CUT: Final = 4.0  # limits
_RETURN_FRACTIONS: Final = (0.2, 0.5, 0.9)  # of the largest stake
_SHORTEST_RUN, _LONGEST_RUN = 30, 300
_RUN: Final = 9.2  # −ln 10⁻⁴
RETURN_AT: Final = 100.0  # one false return in so many scores at most, while the mean is at its level


class DriftTest:
    """Mutable: `record` scores; `evidence` is how rich the gambler is.

    Args:
        limit: the largest mean that is still agreement, above 0.
    """

    __slots__ = ("_capital", "limit")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._capital = [0.0] * len(FRACTIONS)

    def record(self, score: float) -> float:
        """Take in a score; the evidence after it."""
        times = bounded(score) / self.limit - 1.0
        capital = self._capital
        for at, fraction in enumerate(FRACTIONS):
            capital[at] = min(_CEILING, (capital[at] + 1.0) * (1.0 + fraction * times))
        return self.evidence

    @property
    def evidence(self) -> float:
        """In expectation at most the number of scores so far, while answers agree."""
        return sum(self._capital) / len(self._capital)

    def __repr__(self) -> str:
        return f"<DriftTest {self.evidence:.3g} against a mean of {self.limit:.4g}>"


class ReturnTest:
    """Mutable: the test of a demoted device's agreement. `returns` is True once it is shown.

    Args:
        limit: as for `DriftTest`.
        was: the latest scores for which it was demoted, at least one.
        all_or_nothing: whether scores are 0 or 1 by their nature.
        relapses: how often it has come back before, and was demoted again: each asks for ten times the evidence, and
            for a longer run.
    """

    __slots__ = ("_capital", "_cut", "_level", "_needed", "_run", "agreed")

    def __init__(self, limit: float, was: Sequence[float], *, all_or_nothing: bool = False, relapses: int = 0) -> None:
        level = min(0.9, max(_CLEAR * limit, 0.5 * fmean(was)))
        self._cut = 1.0 if all_or_nothing else min(1.0, max(_CUT * limit, 2.0 * level))
        gross = sum(one > self._cut for one in was) / len(was)
        run = min(_LONGEST_RUN, max(_SHORTEST_RUN, _RUN / gross)) if gross else _SHORTEST_RUN
        self._run = 0 if all_or_nothing else ceil(run) * (1 + min(relapses, 4))
        self._level = level / self._cut  # in parts of the cut, as the scores
        self._needed = RETURN_AT * 10.0 ** min(relapses, 4)
        self._capital = [1.0] * len(_RETURN_FRACTIONS)
        self.agreed = 0  # scores since the test began anew

    def record(self, score: float) -> None:
        """Take in a score."""
        score = bounded(score)
        if score > self._cut:
            self._capital = [1.0] * len(_RETURN_FRACTIONS)
            self.agreed = 0
            return
        most = 1.0 / (1.0 - self._level)  # the largest stake that cannot ruin
        for at, fraction in enumerate(_RETURN_FRACTIONS):
            factor = 1.0 + fraction * most * (self._level - score / self._cut)
            self._capital[at] = max(1.0, self._capital[at] * factor)
        self.agreed = self.agreed + 1 if max(self._capital) > 1.0 else 0

    @property
    def returns(self) -> bool:
        return self.agreed >= self._run and sum(self._capital) / len(self._capital) >= self._needed

    def __repr__(self) -> str:
        return f"<ReturnTest {self.agreed} in a row{', agrees' if self.returns else ''}>"


def bounded(score: float) -> float:
    """The score in [0, 1]; what is no such number is no agreement."""
    return score if 0.0 <= score <= 1.0 else 1.0

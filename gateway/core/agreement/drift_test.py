"""A sequential test of a mean, by betting: when the answers of a device disagree too much.

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

It can be wrong: the bound is for the mean that was recorded. Inputs on which an intact variant disagrees more than
`m` on average are alarms by right; `agreement_watch.py` tells them from a device's fault by the other devices.

Invariants: O(1) memory and time a score; a NaN or a score outside of [0, 1] counts as 1.
Source: Shin, Ramdas, Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", NEJSDS 2024;
Waudby-Smith, Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024.
"""

from __future__ import annotations

from typing import Final

FRACTIONS: Final = (0.05, 0.15, 0.4, 0.8)
CEILING: Final = 1e200  # far beyond every threshold, and far from infinity


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
        return self.bet(bounded(score) / self.limit - 1.0)

    def bet(self, times: float) -> float:
        """Take in by how much a score is above its limit, in limits; the evidence after it. −1: it is nothing."""
        capital = self._capital
        for at, fraction in enumerate(FRACTIONS):
            capital[at] = min(CEILING, (capital[at] + 1.0) * (1.0 + fraction * times))
        return self.evidence

    @property
    def evidence(self) -> float:
        """In expectation at most the number of scores so far, while answers agree."""
        return sum(self._capital) / len(self._capital)

    def __repr__(self) -> str:
        return f"<DriftTest {self.evidence:.3g} against a mean of {self.limit:.4g}>"


def bounded(score: float) -> float:
    """The score in [0, 1]; what is no such number is no agreement."""
    return score if 0.0 <= score <= 1.0 else 1.0

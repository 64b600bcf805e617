"""A sequential test of a mean, by betting: when a device that was demoted agrees again.

It is `drift_test.py` the other way: a gambler bets that the mean is now below a level `q` that lies half-way to what
the device was demoted for, and at least CLEAR limits,

    M ← max(M, 1) · (1 + λ · (q − x))        E ≤ 1 for each factor while E[x] ≥ q

Scores of vectors are small and seldom reach far, so they are cut off at `cut` and counted in parts of it, which makes a
larger stake safe and a repair seen in some dozens of answers; one beyond the cut sets the test back to its beginning,
and from there it takes a run so long that a fault that shows in as many inputs as before would have broken it (with a
chance of 10⁻⁴). Scores that are all or nothing cannot be cut.

A device that was demoted for less than twice CLEAR limits, because it changed, has a level of its own: the one from
which on a change accuses, or a fault between both would come back as it went.

Source: Waudby-Smith, Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import fmean
from typing import Final

from gateway.core.agreement.drift_test import bounded

CLEAR: Final = 2.0  # limits
_CUT: Final = 4.0  # limits
_FRACTIONS: Final = (0.2, 0.5, 0.9)  # of the largest stake
_SHORTEST_RUN, _LONGEST_RUN = 30, 300
_RUN: Final = 9.2  # −ln 10⁻⁴
RETURN_AT: Final = 100.0  # one false return in so many scores at most, while the mean is at its level


class ReturnTest:
    """Mutable: the test of a demoted device's agreement. `returns` is True once it is shown.

    Args:
        limit: as for `DriftTest`.
        was: the latest scores for which it was demoted, at least one.
        all_or_nothing: whether scores are 0 or 1 by their nature.
        level: that the mean has to be below, unless half of what it was is CLEAR limits or more; None: CLEAR limits.
        relapses: how often it has come back before, and was demoted again: each asks for ten times the evidence, and
            for a longer run.
    """

    __slots__ = ("_capital", "_cut", "_level", "_needed", "_run", "agreed")

    def __init__(
        self,
        limit: float,
        was: Sequence[float],
        *,
        all_or_nothing: bool = False,
        level: float | None = None,
        relapses: int = 0,
    ) -> None:
        clear, half = CLEAR * limit, 0.5 * fmean(was)
        level = min(0.9, half if half >= clear else clear if level is None else level)
        self._cut = 1.0 if all_or_nothing else min(1.0, max(_CUT * limit, 2.0 * level))
        gross = sum(one > self._cut for one in was) / len(was)
        run = min(_LONGEST_RUN, max(_SHORTEST_RUN, _RUN / gross)) if gross else _SHORTEST_RUN
        self._run = 0 if all_or_nothing else ceil(run) * (1 + min(relapses, 4))
        self._level = level / self._cut  # in parts of the cut, as the scores
        self._needed = RETURN_AT * 10.0 ** min(relapses, 4)
        self._capital = [1.0] * len(_FRACTIONS)
        self.agreed = 0  # scores since the test began anew

    def record(self, score: float) -> None:
        """Take in a score."""
        score = bounded(score)
        if score > self._cut:
            self._capital = [1.0] * len(_FRACTIONS)
            self.agreed = 0
            return
        most = 1.0 / (1.0 - self._level)  # the largest stake that cannot ruin
        for at, fraction in enumerate(_FRACTIONS):
            factor = 1.0 + fraction * most * (self._level - score / self._cut)
            self._capital[at] = max(1.0, self._capital[at] * factor)
        self.agreed = self.agreed + 1 if max(self._capital) > 1.0 else 0

    @property
    def returns(self) -> bool:
        return self.agreed >= self._run and sum(self._capital) / len(self._capital) >= self._needed

    def __repr__(self) -> str:
        return f"<ReturnTest {self.agreed} in a row{', agrees' if self.returns else ''}>"

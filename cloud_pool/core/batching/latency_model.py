"""The latency model predicts the seconds of one call from its padded work and row length, and learns online.

The cost table measured at warm-up has the shape of the cost over work right before the first batch, small end and
caches included, but it knows one row length for each amount of work, and nothing of the present: a throttled device, a
neighbour on the core, attention that makes long rows dearer than short ones of the same work. So the table's own parts
are the basis, and three coefficients are learned from every batch:

    seconds = a · fixed + b · rest(work) + c · rest(work) · length / LENGTH        fixed, rest: of the table

With an affine table this is a + b · tokens + c · tokens · length. It starts at (1, 1, 0), which is the table.

Method: recursive least squares with forgetting, on relative errors (seconds vary over three orders of magnitude, their
errors by ratios). Two things keep it sane:

    no windup   information decays towards that of the prior and not towards none, so the gain is bounded, and what
                has not been seen lately is believed as far as the prior links it to what has: that all coefficients
                move together (the device is slower) is far likelier than that one moves alone
    no fright   a residual is clipped at WINSOR of its own spread (Huber), and each clipped one opens the clip
                geometrically: one stall of any size moves nothing much, a real change is followed at once

Why the table is corrected and not replaced: replayed on 900 measured batches of MiniLM on one core, the mean error of
CPU seconds was 8.1 % for the table and for the table times one learned factor, 3.0 % for a + b·n + c·n·length that
starts from a line through the table, and 3.0 % for this (int8, whose fixed part the table misjudges: 19, 20, 5.2 and
7.2). A line is as good where cost is a line; on a table that is flat and then steep, a GPU's, it cannot bend: 5.3 %
against 4.3. In wall time beside busy processes all are at 23 to 25 %: that is noise. MEMORY: with more the onset of a
slowdown is followed too late, with less noise is learned.

Invariants: coefficients are at least 0, so predictions never fall when work or length grows; they are positive; O(1)
a batch, no clock. Predictions before the first batch are the table's.

It can be wrong where cost jumps between the table's points (a kernel chosen by shape), by as much as the jump.

Source: forgetting towards a prior: Kulhavý and Zarrop, "On a general concept of forgetting", International Journal of
Control 1993; Huber, "Robust Estimation of a Location Parameter", 1964; the clip that opens:
`tidegate/estimate/residual.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from math import exp, inf, log, sqrt
from operator import ge
from statistics import NormalDist
from typing import Final, TypeVar

import numpy as np

from cloud_pool.core.batching.batch_cost import Numbers
from tidegate.estimate.cost_table import CostTable

LENGTH: Final = 256.0  # the unit of length, so that the third coefficient is of the order of the others
MEMORY: Final = 0.92  # share of the information that is kept with each batch
WINSOR: Final = 3.0
FLOOR_SIGMA: Final = 0.05
COLD_SIGMA: Final = 0.25  # of a device that has computed nothing yet
FORGET_S: Final = 30.0  # without a batch for this long, what was learned is worth 1/e
_SIGMA_WEIGHT: Final = 0.05
_WINDOW: Final = 64  # residuals that quantiles are read from
_COLD_COUNT: Final = 19
_INSTANT_S: Final = 1e-6

_PRIOR: Final = (1.0, 1.0, 0.0)
LEAST: Final = (1 / 16, 0.0, 0.0)  # a call never becomes free
_TOGETHER: Final = 0.5  # standard deviations before anything is known: of all coefficients together,
_APART: Final = (0.3, 0.2, 0.2)  # and of each by itself
_OBSERVED: Final = 0.05**-2  # information of one batch; replayed: less leaves the table too much weight
_RELAX_EVERY_S: Final = 0.25  # one step of forgetting is as good as many small ones, and each request would take one

Vector = tuple[float, float, float]
# A symmetric matrix of three, row by row from its diagonal on. Every batch updates one and solves for it, and for so
# few numbers a call of numpy takes longer than all of its arithmetic.
Symmetric = tuple[float, float, float, float, float, float]


def _prior_information() -> Symmetric:
    inverse = np.linalg.inv(_TOGETHER**2 * np.outer(_PRIOR, _PRIOR) + np.diag(np.square(_APART)))
    (aa, ab, ac), (_, bb, bc), (_, _, cc) = inverse.tolist()
    return aa, ab, ac, bb, bc, cc


def _times(matrix: Symmetric, vector: Vector) -> Vector:
    (aa, ab, ac, bb, bc, cc), (a, b, c) = matrix, vector
    return aa * a + ab * b + ac * c, ab * a + bb * b + bc * c, ac * a + bc * b + cc * c


_PRIOR_INFORMATION: Final = _prior_information()
_PRIOR_SUM: Final = _times(_PRIOR_INFORMATION, _PRIOR)


class LatencyModel:
    """Mutable: `record` each computed batch, `relax` now and then."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """Args: points: measured (work, seconds); raises ValueError as `CostTable` does."""
        self.table = CostTable(points)
        self.count = 0
        self._units, self._rest_s, self._slopes = _monotone(self.table)
        self._fixed_s = self.table.seconds[0]
        self._far = np.array([*self._units, self._units[-1] + 1e9])
        self._far_s = np.array([*self._rest_s, self._rest_s[-1] + 1e9 * self._slopes[-1]])
        self._information = _PRIOR_INFORMATION
        self._sum = _PRIOR_SUM
        self._a, self._b, self._c = _PRIOR
        self._variance = COLD_SIGMA**2
        cold = NormalDist(0.0, COLD_SIGMA)
        self._residuals = deque((cold.inv_cdf((n + 0.5) / _COLD_COUNT) for n in range(_COLD_COUNT)), _WINDOW)
        self._sorted = sorted(self._residuals)
        self._idle_since: float | None = None

    def predict_s(self, units: float, length: float) -> float:
        """Median seconds."""
        return self._a * self._fixed_s + self._rest(units) * (self._b + self._c * length / LENGTH)

    def predict_many_s(self, units: Numbers, lengths: Numbers) -> Numbers:
        rest_s = np.interp(units, self._far, self._far_s)
        found: Numbers = self._a * self._fixed_s + rest_s * (self._b + self._c / LENGTH * lengths)
        return found

    def quantile(self, share: float) -> float:
        """The factor by which a prediction is multiplied so that this share of batches takes less."""
        place = share * (len(self._sorted) - 1)
        low = min(int(place), len(self._sorted) - 2)
        return exp(self._sorted[low] + (place - low) * (self._sorted[low + 1] - self._sorted[low]))

    def record(self, units: float, length: float, observed_s: float) -> None:
        """Learn from a computed batch."""
        predicted_s = self.predict_s(units, length)
        observed_s = max(observed_s, _INSTANT_S)
        self._notice(log(observed_s / predicted_s))
        # Huber: the relative error is clipped at WINSOR sigmas; the variance follows the clipped error, so that
        # repeated large errors open the clip.
        limit = WINSOR * self.sigma
        error = min(limit, max(-limit, observed_s / predicted_s - 1.0))
        self._variance += _SIGMA_WEIGHT * (error * error - self._variance)
        # Recursive least squares in information form: forget towards the prior, add this batch, solve.
        rest_s = self._rest(units)
        a, b, c = self._fixed_s / predicted_s, rest_s / predicted_s, rest_s * length / LENGTH / predicted_s
        seen = (a * a, a * b, a * c, b * b, b * c, c * c)
        self._information = _blended(self._information, _PRIOR_INFORMATION, seen, _OBSERVED)
        self._sum = _blended(self._sum, _PRIOR_SUM, (a, b, c), _OBSERVED * (1.0 + error))
        self._a, self._b, self._c = _bounded(self._information, self._sum)
        self.count += 1
        self._idle_since = None

    def relax(self, now: float) -> None:
        """Forget a little for the time since the last `relax`, if nothing was recorded since."""
        if self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= _RELAX_EVERY_S:
            # What was learned decays towards the prior, exponentially with the idle time.
            kept = exp(-(now - self._idle_since) / FORGET_S)
            a, b, c = _PRIOR
            self._a, self._b, self._c = a + kept * (self._a - a), b + kept * (self._b - b), c + kept * (self._c - c)
            self._sum = _times(self._information, self.coefficients)
            self._idle_since = now

    @property
    def sigma(self) -> float:
        """The standard deviation of the log residual: about the share by which a batch differs from its prediction."""
        return max(FLOOR_SIGMA, sqrt(self._variance))

    @property
    def coefficients(self) -> tuple[float, float, float]:
        return self._a, self._b, self._c

    def __repr__(self) -> str:
        learned = ", ".join(f"{one:.2f}" for one in self.coefficients)
        return f"<LatencyModel {self.table!r} x ({learned}), p95 x{self.quantile(0.95):.2f} after {self.count} batches>"

    def _rest(self, units: float) -> float:
        points = self._units
        if units <= points[0]:
            return 0.0
        left = bisect_right(points, units) - 1
        return self._rest_s[left] + self._slopes[left] * (units - points[left])

    def _notice(self, residual: float) -> None:
        """Keep the residual among the last `_WINDOW`, also in order."""
        if len(self._residuals) == _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._residuals[0])]
        self._residuals.append(residual)
        insort(self._sorted, residual)


def _monotone(table: CostTable) -> tuple[list[float], list[float], list[float]]:
    """Of each point: its work, its seconds beyond the fixed part, never falling, and the slope that begins there."""
    highest, rest_s = -inf, []
    for seconds in table.seconds:
        highest = max(highest, seconds)
        rest_s.append(highest - table.seconds[0])
    slopes = [
        (rest_s[at + 1] - rest_s[at]) / (table.units[at + 1] - table.units[at]) for at in range(len(rest_s) - 1)
    ] or [0.0]
    return table.units, rest_s, [*slopes, slopes[-1]]


Numbers3 = TypeVar("Numbers3", Vector, Symmetric)


def _blended(known: Numbers3, prior: Numbers3, seen: Numbers3, weight: float) -> Numbers3:
    """What is known, decayed towards the prior, with what was seen now."""
    triples = zip(known, prior, seen, strict=True)
    return tuple([MEMORY * one + (1.0 - MEMORY) * before + weight * now for one, before, now in triples])  # type: ignore[return-value]


def _bounded(information: Symmetric, total: Vector) -> Vector:
    """The least squares' solution with no coefficient below its LEAST."""
    # Active set: solve for the free coefficients, fix the one that is furthest below its bound, and solve again.
    unbounded = _solved_for_all(information, total)
    if all(map(ge, unbounded, LEAST)):
        return unbounded
    free, found = [0, 1, 2], list(LEAST)
    while free:
        for at, value in zip(free, _solved(information, total, free), strict=True):
            found[at] = value
        below, worst = min((found[at] - LEAST[at], at) for at in free)
        if below >= 0.0:
            break
        found[worst] = LEAST[worst]
        free.remove(worst)
    return found[0], found[1], found[2]


def _solved_for_all(information: Symmetric, total: Vector) -> Vector:
    """`_solved` where all are free, spelled out, as most batches need no more."""
    (aa, ab, ac, bb, bc, cc), (a, b, c) = information, total
    by_b, by_c = ab / aa, ac / aa
    bb, bc, cc = bb - by_b * ab, bc - by_b * ac, cc - by_c * ac
    b, c = b - by_b * a, c - by_c * a
    third = (c - bc / bb * b) / (cc - bc / bb * bc)
    second = (b - bc * third) / bb
    return (a - ab * second - ac * third) / aa, second, third


_AT: Final = ((0, 1, 2), (1, 3, 4), (2, 4, 5))  # where a symmetric matrix keeps each of its entries


def _solved(information: Symmetric, total: Vector, free: Sequence[int]) -> list[float]:
    """The free coefficients by Gaussian elimination, where the others are LEAST. The matrix is positive definite."""
    held = [at for at in (0, 1, 2) if at not in free]
    rows = [
        [information[_AT[row][at]] for at in free]
        + [total[row] - sum([information[_AT[row][at]] * LEAST[at] for at in held])]
        for row in free
    ]
    for at, pivot in enumerate(rows):
        for below in rows[at + 1 :]:
            factor = below[at] / pivot[at]
            for column in range(at, len(pivot)):
                below[column] -= factor * pivot[column]
    found = [0.0] * len(rows)
    for at in reversed(range(len(rows))):
        known = sum([rows[at][later] * found[later] for later in range(at + 1, len(rows))])
        found[at] = (rows[at][-1] - known) / rows[at][at]
    return found

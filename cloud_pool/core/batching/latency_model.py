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

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import NormalDist
from typing import Final

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

_PRIOR: Final = np.array([1.0, 1.0, 0.0])
LEAST: Final = np.array([1 / 16, 0.0, 0.0])  # a call never becomes free
_TOGETHER: Final = 0.5  # standard deviations before anything is known: of all coefficients together,
_APART: Final = (0.3, 0.2, 0.2)  # and of each by itself
_PRIOR_INFORMATION: Final = np.linalg.inv(_TOGETHER**2 * np.outer(_PRIOR, _PRIOR) + np.diag(np.square(_APART)))
_OBSERVED: Final = 0.05**-2  # information of one batch; replayed: less leaves the table too much weight


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
        self._information = _PRIOR_INFORMATION.copy()
        self._sum = _PRIOR_INFORMATION @ _PRIOR
        self._a, self._b, self._c = 1.0, 1.0, 0.0
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
        residual = log(observed_s / predicted_s)
        self._residuals.append(residual)
        self._sorted = sorted(self._residuals)
        # Huber: the relative error is clipped at WINSOR sigmas; the variance follows the clipped error, so that
        # repeated large errors open the clip.
        limit = WINSOR * self.sigma
        error = min(limit, max(-limit, observed_s / predicted_s - 1.0))
        self._variance += _SIGMA_WEIGHT * (error * error - self._variance)
        # Recursive least squares in information form: forget towards the prior, add this batch, solve.
        rest_s = self._rest(units)
        seen = np.array([self._fixed_s, rest_s, rest_s * length / LENGTH]) / predicted_s
        self._information = self._blend(self._information, _PRIOR_INFORMATION) + _OBSERVED * np.outer(seen, seen)
        self._sum = self._blend(self._sum, _PRIOR_INFORMATION @ _PRIOR) + _OBSERVED * (1.0 + error) * seen
        self._become(_bounded(self._information, self._sum))
        self.count += 1
        self._idle_since = None

    def relax(self, now: float) -> None:
        """Forget a little for the time since the last `relax`, if nothing was recorded since."""
        if self._idle_since is not None:
            # What was learned decays towards the prior, exponentially with the idle time.
            kept = exp(-max(0.0, now - self._idle_since) / FORGET_S)
            learned = np.array([self._a, self._b, self._c])
            self._become(_PRIOR + kept * (learned - _PRIOR))
            self._sum = self._information @ np.array([self._a, self._b, self._c])
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

    def _become(self, coefficients: Numbers) -> None:
        self._a, self._b, self._c = coefficients.tolist()

    @staticmethod
    def _blend(known: Numbers, prior: Numbers) -> Numbers:
        blended: Numbers = MEMORY * known + (1.0 - MEMORY) * prior
        return blended


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


def _bounded(information: Numbers, total: Numbers) -> Numbers:
    """The least squares' solution with no coefficient below its LEAST."""
    # Active set: solve for the free coefficients, fix the one that is furthest below its bound, and solve again.
    free, found = [0, 1, 2], LEAST.copy()
    while free:
        held = [one for one in range(3) if one not in free]
        known = information[np.ix_(free, held)] @ LEAST[held]
        found[free] = np.linalg.solve(information[np.ix_(free, free)], total[free] - known)
        below = found[free] - LEAST[free]
        if below.min() >= 0.0:
            break
        worst = free[int(below.argmin())]
        found[worst] = LEAST[worst]
        free.remove(worst)
    return found

"""Log residuals: how far predictions have been off lately, as one factor and one spread.

A cost table measured at warm-up is wrong the moment a device throttles, shares its cores or changes its mix of
shapes. Every finished call shows by how much: `y = log(observed / predicted)`. Service times err by ratios, not by
seconds, so both the bias and the variance of `y` are kept, exponentially weighted; `factor` multiplies the next
prediction and `sigma` is the spread of its logarithm, so that a caller may read the answer's time as
LogNormal(log(predicted · factor), sigma²).

One page fault must not reprice a device: a residual is winsorised at three of its own sigmas from the bias. A real
change is still learned quickly, because each clipped residual lets the variance grow by two fifths, so the clip opens
geometrically: a doubling is nine tenths learned after some 30 calls. Starting from zero bias is the shrinkage to the
measured table, worth about `1 / bias_weight` calls.

Invariants: `MIN_FACTOR <= factor <= MAX_FACTOR`; `sigma` never falls below `FLOOR_SIGMA`, nor below `COLD_SIGMA`
before `COLD_COUNT` calls. O(1), no clock. Only calls that were really computed may be recorded: a refusal's time says
nothing.

Source: docs/design/routing.md, "Service-time estimates"; EWMA variance as in Finch, "Incremental calculation of
weighted mean and variance", 2009.
"""

from __future__ import annotations

from math import exp, log, sqrt

MIN_FACTOR = 1 / 16
MAX_FACTOR = 16.0
FLOOR_SIGMA = sqrt(0.03)  # what remains of a prediction's spread on a quiet machine
COLD_SIGMA = 0.25
COLD_COUNT = 20
_WINSOR = 3.0
_LEAST_BIAS, _MOST_BIAS = log(MIN_FACTOR), log(MAX_FACTOR)
_INSTANT_S = 1e-6  # what a clock may round to nothing counts as this much


class LogResidual:
    """Mutable: `record` after each computed call; read `factor` and `sigma` before the next."""

    __slots__ = ("_bias", "_bias_weight", "_variance", "_variance_weight", "count")

    def __init__(self, *, bias_weight: float = 0.08, variance_weight: float = 0.05) -> None:
        self.count = 0
        self._bias = 0.0
        self._variance = COLD_SIGMA**2 - FLOOR_SIGMA**2
        self._bias_weight = bias_weight
        self._variance_weight = variance_weight

    def record(self, predicted_s: float, observed_s: float) -> None:
        """Learn from one computed call. `predicted_s` is the table's value, before `factor`."""
        # Comparisons instead of `min` and `max`: this runs for every answer, here and in every agent.
        took_s = observed_s if observed_s > _INSTANT_S else _INSTANT_S
        table_s = predicted_s if predicted_s > _INSTANT_S else _INSTANT_S
        deviation = log(took_s / table_s) - self._bias
        limit = _WINSOR * self.sigma
        clipped = limit if deviation > limit else -limit if deviation < -limit else deviation
        bias = self._bias + self._bias_weight * clipped
        self._bias = _MOST_BIAS if bias > _MOST_BIAS else _LEAST_BIAS if bias < _LEAST_BIAS else bias
        self._variance += self._variance_weight * (clipped * clipped - self._variance)
        self.count += 1

    def relearn(self, factor: float) -> None:
        """Take a change for known at once; `record` would learn it bit by bit."""
        self._bias = min(_MOST_BIAS, max(_LEAST_BIAS, log(factor)))

    def fade(self, share: float) -> None:
        """Forget `share` (0 to 1) of the bias: what was learned long ago is worth less than the measured table."""
        self._bias *= 1.0 - share

    @property
    def factor(self) -> float:
        """What a prediction should be multiplied with; 1 before anything was recorded."""
        return min(MAX_FACTOR, max(MIN_FACTOR, exp(self._bias)))

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of (observed / corrected prediction)."""
        sigma = sqrt(self._variance + FLOOR_SIGMA**2)
        return sigma if self.count >= COLD_COUNT else max(COLD_SIGMA, sigma)

    def __repr__(self) -> str:
        return f"<LogResidual x{self.factor:.2f} sigma {self.sigma:.2f} after {self.count} calls>"

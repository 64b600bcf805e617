"""The batch effect is how a time grows with the number of sequences that an engine steps together, as a power law.

    time(b) = base · e^shift · b^exponent        shift, exponent: least squares on logarithms, decayed

The base is what warm-up measured with one sequence; everything beyond is learned from answers, by the number that were
under way when each began. A pool's step hardly grows with its batch, and a small device's grows as the batch does: one
exponent tells them apart after a few answers, also where only two sizes of batches were ever seen. What happens to the
batch afterwards is not known at that moment, and is in `sigma`, the spread of the logarithm of what came.

Both begin at a prior (no shift, an exponent of `_EXPONENT`), which counts like a few answers. One odd answer must not
reprice a target: what is beyond three sigmas counts as three, and widens sigma, so that a real change is let in.

It can be wrong where other work shares the device: then a batch of one is slow and the law has no place for it but the
shift. Invariants: `_LEAST <= shift <= _MOST` in factors, 0 <= exponent <= `_STEEPEST`, sigma >= `FLOOR_SIGMA`; O(1), no
clock. Source: recursive least squares with forgetting for two coefficients (Ljung, "System Identification", 1999,
11.2); winsorised as in `tidegate/estimate/residual.py`.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import Final

FLOOR_SIGMA: Final = 0.05
_COLD_SIGMA: Final = 0.35
_COLD_COUNT: Final = 12
_KEEP: Final = 0.95  # of what is remembered, at each answer: some 20 of them
_VARIANCE_WEIGHT: Final = 0.08
_WINSOR: Final = 3.0
_EXPONENT: Final = 0.3  # between a pool's batch, which is nearly free, and a single core's, which is not
_LEAST, _MOST = log(1 / 16), log(16.0)
_STEEPEST: Final = 1.2
_INSTANT_S: Final = 1e-6

# The prior as imaginary answers: (weight, log of the batch), each on the prior's line.
_IMAGINARY: Final[tuple[tuple[float, float], ...]] = ((2.0, 0.0), (2.0, log(4.0)))


class BatchEffect:
    """Mutable: `record` each answer's time, `times` says by how much one is longer than its base."""

    __slots__ = ("_count", "_sums", "_variance", "exponent", "shift")

    def __init__(self) -> None:
        self.shift = 0.0
        self.exponent = _EXPONENT
        self._count = 0
        self._variance = _COLD_SIGMA**2
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # Σ 1, x, y, x², xy of answers, decayed

    @property
    def sigma(self) -> float:
        """The standard deviation of the logarithm of what comes."""
        sigma = max(FLOOR_SIGMA, sqrt(self._variance))
        return sigma if self._count >= _COLD_COUNT else max(_COLD_SIGMA, sigma)

    def times(self, batch: float) -> float:
        """How many times its base a time is, in the median, with so many sequences under way, itself included."""
        return exp(self.shift + self.exponent * log(batch)) if batch > 1.0 else exp(self.shift)

    def record(self, base_s: float, observed_s: float, batch: float) -> None:
        """Learn from one answer. `base_s` is the prediction for one sequence, before anything was learned."""
        x = log(max(1.0, batch))
        expected = self.shift + self.exponent * x
        deviation = log(max(observed_s, _INSTANT_S) / max(base_s, _INSTANT_S)) - expected
        limit = _WINSOR * self.sigma
        clipped = max(-limit, min(limit, deviation))
        y = expected + clipped
        self._variance += _VARIANCE_WEIGHT * (clipped * clipped - self._variance)
        one, sx, sy, sxx, sxy = (_KEEP * each for each in self._sums)
        self._sums = one + 1.0, sx + x, sy + y, sxx + x * x, sxy + x * y
        self._count += 1
        self._solve()

    def fade(self, share: float) -> None:
        """Forget `share` (0 to 1) of what answers have shown."""
        left = 1.0 - share
        one, sx, sy, sxx, sxy = self._sums
        self._sums = one * left, sx * left, sy * left, sxx * left, sxy * left
        self._solve()

    def _solve(self) -> None:
        one, sx, sy, sxx, sxy = self._sums
        for weight, x in _IMAGINARY:
            y = _EXPONENT * x
            one, sx, sy = one + weight, sx + weight * x, sy + weight * y
            sxx, sxy = sxx + weight * x * x, sxy + weight * x * y
        # Normal equations of y = shift + exponent · x; the imaginary answers keep the determinant above 0.
        exponent = (one * sxy - sx * sy) / (one * sxx - sx * sx)
        self.exponent = max(0.0, min(_STEEPEST, exponent))
        self.shift = max(_LEAST, min(_MOST, (sy - self.exponent * sx) / one))

    def __repr__(self) -> str:
        return f"<BatchEffect x{exp(self.shift):.2f} b^{self.exponent:.2f} sigma {self.sigma:.2f}>"

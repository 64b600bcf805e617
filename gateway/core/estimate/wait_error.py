"""The wait error is how far predicted waits have been off at one target: a factor and a spread, learned from answers.

A wait is predicted from what is known to be ahead: our own work and the target's last report. What is not known errs
in ways that repeat: others send work there too, a batch takes more with it or less than was thought, tighter requests
pass. So the queue time that every answer reports is compared with the prediction:

    wait = factor × predicted        factor = Σ observed · predicted / Σ predicted²      (least squares, decayed)
    spread² = floor² + (ratio × wait)²

`floor` is learned where hardly any wait was predicted and `ratio` where it was, so that neither explains the other's
errors. Both start from a prior (factor 1, ratio 0.3 of docs/design/routing.md, "Queue waits and the local ledger") that
counts like a few observations.

Invariants: MIN_FACTOR <= factor <= MAX_FACTOR, spreads are above 0. O(1), no clock.
It can be wrong in a queue that is served by deadline, where two requests with one prediction fare differently.
Source: recursive least squares with forgetting, for one coefficient; docs/design/routing.md, "Queue waits and the local
ledger".
"""

from __future__ import annotations

from math import sqrt
from typing import Final

MIN_FACTOR: Final = 0.1
MAX_FACTOR: Final = 3.0
_KEEP: Final = 0.98  # of what is remembered, at each observation: some 50 of them
_PRIOR_S2: Final = 0.05**2  # the weight of the prior: a wait of 50 ms that was predicted rightly
_SHORT_S: Final = 0.010  # a predicted wait below this is evidence of the floor, from here on of the ratio
_RATIO: Final = 0.3
_FLOOR_S: Final = 0.001  # a timer's worth
_WEIGHT: Final = 0.05
_MOST: Final = 3.0  # a wait that was so many times off says no more than that


class WaitError:
    """Mutable: `record` with each answer; `factor` and `spread_s` for the next prediction."""

    __slots__ = ("_floor2", "_moments", "_ratio2", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._moments = (0.0, 0.0)  # Σ observed · predicted, Σ predicted²
        self._ratio2 = _RATIO * _RATIO
        self._floor2 = _FLOOR_S * _FLOOR_S

    def record(self, predicted_s: float, observed_s: float) -> None:
        """Learn from one wait. `predicted_s` is the word before `factor`."""
        if predicted_s < _SHORT_S:
            excess = min(observed_s, _MOST * _SHORT_S)
            self._floor2 = max(_FLOOR_S * _FLOOR_S, self._floor2 + _WEIGHT * (excess * excess - self._floor2))
            return
        error = min(abs(observed_s / predicted_s - self.factor), _MOST)
        self._ratio2 += _WEIGHT * (error * error - self._ratio2)
        product, square = self._moments
        observed_s = min(observed_s, MAX_FACTOR * predicted_s)
        product = _KEEP * product + observed_s * predicted_s
        square = _KEEP * square + predicted_s * predicted_s
        self._moments = product, square
        self.factor = min(MAX_FACTOR, max(MIN_FACTOR, (product + _PRIOR_S2) / (square + _PRIOR_S2)))

    def variance(self, predicted_s: float) -> float:
        """Of a wait that was predicted so (before `factor`), in seconds squared."""
        return self._floor2 + self._ratio2 * predicted_s * predicted_s

    def __repr__(self) -> str:
        return f"<WaitError × {self.factor:.2f} ± {sqrt(self._ratio2):.2f}>"

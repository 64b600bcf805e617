"""Service time on one device: the table measured at warm-up, times what its calls have shown since.

`CostTable` knows the shape of the cost over work and never changes; `LogResidual` knows by how much the device is off
today and forgets. Together they answer the one question that admission, batching and placement ask: how long would
this take here?

A factor that was learned in a bad minute must not outlive it: a device that is thought slow gets no more requests, so
no answer would ever correct it. `relax`, called before predictions, lets the factor drift back to the table while
nothing is recorded.

Invariant: predictions are positive and do not fall when work grows by a table point or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Final

from tidegate.estimate.cost_table import CostTable
from tidegate.estimate.residual import LogResidual

_P99_SIGMAS: Final = 2.326
FORGET_S: Final = 30.0  # without a call for this long, a factor is worth 1/e of what it was


class ServiceTime:
    """Mutable: `record` after each computed call, `relax` now and then."""

    __slots__ = ("_idle_since", "residual", "table")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self.table = CostTable(points)
        self.residual = LogResidual()
        self._idle_since: float | None = None  # the first `relax` since the last `record`

    def predict_s(self, units: float) -> float:
        """Median seconds for one call of `units` work, alone on the device."""
        return self.table.seconds_for(units) * self.residual.factor

    def p99_s(self, units: float) -> float:
        """Seconds that 99 of 100 such calls take at most."""
        return self.predict_s(units) * exp(_P99_SIGMAS * self.residual.sigma)

    def record(self, units: float, observed_s: float) -> None:
        self.residual.record(self.table.seconds_for(units), observed_s)
        self._idle_since = None

    def relax(self, now: float) -> None:
        """Forget a little for the time since the last `relax`, if nothing was recorded since."""
        if self._idle_since is not None:
            self.residual.fade(1.0 - exp(-max(0.0, now - self._idle_since) / FORGET_S))
        self._idle_since = now

    def __repr__(self) -> str:
        return f"<ServiceTime {self.table!r} {self.residual!r}>"

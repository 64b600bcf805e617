"""Service time on one device: the table measured at warm-up, times what its calls have shown since.

`CostTable` knows the shape of the cost over work and never changes; `LogResidual` knows by how much the device is off
today and forgets. Together they answer the one question that admission, batching and placement ask: how long would
this take here?

Invariant: predictions are positive and do not fall when work grows by a table point or more.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.estimate.cost_table import CostTable
from tidegate.estimate.residual import LogResidual


class ServiceTime:
    """Mutable: `record` after each computed call."""

    __slots__ = ("residual", "table")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self.table = CostTable(points)
        self.residual = LogResidual()

    def predict_s(self, units: float) -> float:
        """Median seconds for one call of `units` work, alone on the device."""
        return self.table.seconds_for(units) * self.residual.factor

    def record(self, units: float, observed_s: float) -> None:
        self.residual.record(self.table.seconds_for(units), observed_s)

    def __repr__(self) -> str:
        return f"<ServiceTime {self.table!r} {self.residual!r}>"

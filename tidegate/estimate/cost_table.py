"""Service time from work: the table that each target measures at warm-up, read between its points.

Work is counted in the unit that the model's manifest names (tokens, pixels, items, bytes). Cost is nearly affine in
work on CPUs and small GPUs, but not at the small end (dispatch) nor at the large end (caches), so the table keeps the
measured points and interpolates between neighbours; beyond the last point it goes on with the last slope, and below
the first it stays flat, since the fixed part of a call does not shrink.

It can be wrong when a device throttles or shares its cores: online correction belongs to the code that predicts with
it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise


class CostTable:
    """Points of (work units, seconds), sorted by work.

    Raises:
        ValueError: no points, or a point that is not positive, or two points at the same work.
    """

    __slots__ = ("_slopes", "seconds", "units")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        ordered = sorted((float(units), float(seconds)) for units, seconds in points)
        self.units = [units for units, _ in ordered]
        self.seconds = [seconds for _, seconds in ordered]
        if not ordered:
            raise ValueError("a cost table needs at least one point")
        if min(self.units) < 0 or not min(self.seconds) > 0 or len(set(self.units)) != len(ordered):
            raise ValueError(f"cost points must have distinct work >= 0 and seconds > 0, not {ordered}")
        # Of the stretch that begins at each point, the last of which goes on for ever. A noisy measurement may slope
        # down; more work is never cheaper than the point before it.
        slopes = [max(0.0, (to[1] - at[1]) / (to[0] - at[0])) for at, to in pairwise(ordered)] or [0.0]
        self._slopes = [*slopes, slopes[-1]]

    def seconds_for(self, units: float) -> float:
        """Predicted service seconds for one call of `units` work on an idle device."""
        points = self.units
        if units <= points[0]:
            return self.seconds[0]
        left = bisect_right(points, units) - 1
        return self.seconds[left] + self._slopes[left] * (units - points[left])

    def floor_for(self, units: float) -> float:
        """Seconds that the table proves to be needed: no more than any measured call of as much work took.

        A refusal needs proof. A point that was disturbed while it was measured, or the line through it beyond the
        table, is a guess: more work that took less time overrules it, and past the last point nothing is known.
        """
        larger = self.seconds[bisect_left(self.units, units) :]
        return min(self.seconds_for(min(units, self.units[-1])), *larger, self.seconds[-1])

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self.units, self.seconds, strict=True))

    def __repr__(self) -> str:
        first, last = self.points[0], self.points[-1]
        return f"<CostTable {first[0]:g}:{first[1] * 1e3:.2f}ms … {last[0]:g}:{last[1] * 1e3:.2f}ms>"

"""Whether a series grows, and how fast, without believing in any distribution.

Mann and Kendall count for how many pairs the later value is the larger; Sen takes the median of all pairs' slopes.
Neither is moved by a few outliers, and neither asks how the noise is distributed, only that it is independent: looks
must lie far enough apart for that. Both are O(n²) in the number of looks, which callers bound (60 are 1,770 pairs).

`Leak` applies both to memory: one look a minute, and the time until it is full if it surely grows.

Source: Mann 1945; Kendall, "Rank Correlation Methods", 1975; Sen, "Estimates of the Regression Coefficient Based on
Kendall's Tau", JASA 1968.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median
from typing import Final

ONE_PERCENT: Final = 2.326  # one-sided, in standard deviations
TREND_EVERY_S: Final = 60.0
TREND_LEAST: Final = 20
TREND_MOST: Final = 60


def grows(values: Sequence[float], sigmas: float = ONE_PERCENT) -> bool:
    """Mann and Kendall's test for an upward trend, with ties."""
    n = len(values)
    score = sum(_sign(values[j] - values[i]) for i in range(n) for j in range(i + 1, n))
    ties = [values.count(value) for value in set(values)]
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18.0
    return variance > 0.0 and (score - 1) / sqrt(variance) > sigmas


def sen_slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of all pairs' slopes, of (instant, value)."""
    return median(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for place, earlier in enumerate(points)
        for later in points[place + 1 :]
    )


@dataclass(slots=True)
class Leak:
    """Resident memory once a minute, and when it will be too much. Mutable: `record`."""

    sigmas: float = ONE_PERCENT
    _samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=TREND_MOST))
    _age_s: float = 0.0
    _due_at_s: float = 0.0

    def record(self, elapsed_s: float, rss_bytes: float) -> bool:
        """Take in a look, `elapsed_s` after the one before; returns whether it was kept."""
        self._age_s += elapsed_s
        if self._age_s < self._due_at_s:
            return False
        self._samples.append((self._age_s, rss_bytes))
        self._due_at_s = self._age_s + TREND_EVERY_S
        return True

    def slope(self) -> float:
        """Bytes a second; 0 unless it surely grows."""
        if len(self._samples) < TREND_LEAST or not grows([rss for _, rss in self._samples], self.sigmas):
            return 0.0
        return max(0.0, sen_slope(list(self._samples)))

    def limit_in_s(self, limit_bytes: float) -> float:
        """Seconds until memory reaches `limit_bytes`; infinity unless it surely grows."""
        slope = self.slope()
        return max(0.0, limit_bytes - self._samples[-1][1]) / slope if slope > 0.0 else inf


def _sign(value: float) -> int:
    return (value > 0.0) - (value < 0.0)

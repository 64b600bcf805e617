"""Shapes of jitter: how much longer than the least does it take this time?

Each is a value that turns uniform chance into seconds, never negative. What to take: `LogNormal` fits WiFi and
cellular delays well, `Pareto` has the rare very long ones, `Normal` is what `tc netem` and Toxiproxy users know,
`Uniform` has hard edges, `Constant` has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, exp, log, pi, sqrt
from typing import Protocol

Draw = Callable[[], float]  # uniform in [0, 1)


class Distribution(Protocol):
    def sample_s(self, draw: Draw) -> float:
        """Seconds, not negative."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    seconds: float

    def sample_s(self, draw: Draw) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Uniform:
    low_s: float
    high_s: float

    def sample_s(self, draw: Draw) -> float:
        return self.low_s + (self.high_s - self.low_s) * draw()


@dataclass(frozen=True, slots=True)
class Normal:
    """Cut off at zero, so its mean is a little over `mean_s` where the deviation is large."""

    mean_s: float
    deviation_s: float

    def sample_s(self, draw: Draw) -> float:
        return max(0.0, self.mean_s + self.deviation_s * standard_normal(draw))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """`sigma` is the deviation of the logarithm: at 1, one in twenty takes over five times the median."""

    median_s: float
    sigma: float

    def sample_s(self, draw: Draw) -> float:
        return self.median_s * exp(self.sigma * standard_normal(draw))


@dataclass(frozen=True, slots=True)
class Pareto:
    """Lomax: starts at zero, has the median given, and a tail as u^-alpha. Finite mean for alpha over 1."""

    median_s: float
    alpha: float

    def sample_s(self, draw: Draw) -> float:
        scale_s = self.median_s / (exp(log(2.0) / self.alpha) - 1.0)
        return scale_s * (exp(-log(1.0 - draw()) / self.alpha) - 1.0)


def standard_normal(draw: Draw) -> float:
    """Mean 0, deviation 1 (Box and Muller, one of the pair: keeping the other would be state)."""
    return sqrt(-2.0 * log(1.0 - draw())) * cos(2.0 * pi * draw())

"""Distributions of jitter: by how much a delay exceeds the least one.

Each is a value that turns uniform chance into seconds, never negative. What to take: `LogNormal` fits WiFi and
cellular delays well, `Pareto` has the rare very long ones, `Normal` is what `tc netem` and Toxiproxy users know,
`Uniform` has hard edges, `Constant` has none, and `Empirical` is whatever was measured.

`sample_s` draws one afresh. `quantile_s` is the same shape by probability; `Correlated` uses it to let each sample
resemble the one before, which delays of one link do: a slow packet follows a slow packet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cos, exp, log, pi, sqrt
from statistics import NormalDist
from typing import Final, Protocol

Draw = Callable[[], float]  # uniform in [0, 1)
_STANDARD: Final = NormalDist()
_LEAST_CHANCE: Final = 1e-12  # quantiles of 0 and 1 may be infinite


class Distribution(Protocol):
    def sample_s(self, draw: Draw) -> float:
        """Seconds, not negative."""
        ...

    def quantile_s(self, chance: float) -> float:
        """What this share of all samples is below; `chance` is in (0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    seconds: float

    def sample_s(self, draw: Draw) -> float:
        return self.seconds

    def quantile_s(self, chance: float) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Uniform:
    low_s: float
    high_s: float

    def sample_s(self, draw: Draw) -> float:
        return self.quantile_s(draw())

    def quantile_s(self, chance: float) -> float:
        return self.low_s + (self.high_s - self.low_s) * chance


@dataclass(frozen=True, slots=True)
class Normal:
    """Cut off at zero, so its mean is a little over `mean_s` where the deviation is large."""

    mean_s: float
    deviation_s: float

    def sample_s(self, draw: Draw) -> float:
        return max(0.0, self.mean_s + self.deviation_s * standard_normal(draw))

    def quantile_s(self, chance: float) -> float:
        return max(0.0, self.mean_s + self.deviation_s * _STANDARD.inv_cdf(chance))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """`sigma` is the deviation of the logarithm: at 1, one in twenty takes over five times the median."""

    median_s: float
    sigma: float

    def sample_s(self, draw: Draw) -> float:
        return self.median_s * exp(self.sigma * standard_normal(draw))

    def quantile_s(self, chance: float) -> float:
        return self.median_s * exp(self.sigma * _STANDARD.inv_cdf(chance))


@dataclass(frozen=True, slots=True)
class Pareto:
    """Lomax: starts at zero, has the median given, and a tail as u^-alpha. Finite mean for alpha over 1."""

    median_s: float
    alpha: float

    def sample_s(self, draw: Draw) -> float:
        return self.quantile_s(draw())

    def quantile_s(self, chance: float) -> float:
        # The inverse of F(x) = 1 - (1 + x / scale)^-alpha, with the scale for which F(median) is a half.
        scale_s = self.median_s / (exp(log(2.0) / self.alpha) - 1.0)
        return scale_s * (exp(-log(1.0 - chance) / self.alpha) - 1.0)


class Empirical:
    """As measured: any number of samples, with straight lines between them."""

    __slots__ = ("_sorted_s",)

    def __init__(self, samples_s: Sequence[float]) -> None:
        if not samples_s or min(samples_s) < 0.0:
            raise ValueError("an empirical distribution needs at least one sample, and none below 0")
        self._sorted_s = sorted(samples_s)

    def sample_s(self, draw: Draw) -> float:
        return self.quantile_s(draw())

    def quantile_s(self, chance: float) -> float:
        place = chance * (len(self._sorted_s) - 1)
        below = int(place)
        above = min(below + 1, len(self._sorted_s) - 1)
        return self._sorted_s[below] + (place - below) * (self._sorted_s[above] - self._sorted_s[below])

    def __repr__(self) -> str:
        return f"<Empirical {len(self._sorted_s)} samples, median {self.quantile_s(0.5) * 1e3:g} ms>"


class Correlated:
    """The same shape, each sample like the last: `correlation` is that of neighbours' normal scores. Mutable.

    The scores are a first-order autoregression and are turned back by the shape's quantiles, so the shape stays exactly
    what it was. (netem's own `correlation` narrows it: averages of uniform draws are not uniform.)
    """

    __slots__ = ("_correlation", "_score", "_shape")

    def __init__(self, shape: Distribution, correlation: float) -> None:
        if not 0.0 <= correlation < 1.0:
            raise ValueError(f"correlation must be from 0 up to below 1, not {correlation}")
        self._shape = shape
        self._correlation = correlation
        self._score: float | None = None

    def sample_s(self, draw: Draw) -> float:
        fresh = standard_normal(draw)
        if self._score is None:
            self._score = fresh
        else:
            # The second weight keeps the variance of the scores at 1.
            self._score = self._correlation * self._score + sqrt(1.0 - self._correlation**2) * fresh
        return self.quantile_s(_STANDARD.cdf(self._score))

    def quantile_s(self, chance: float) -> float:
        return self._shape.quantile_s(min(max(chance, _LEAST_CHANCE), 1.0 - _LEAST_CHANCE))

    def __repr__(self) -> str:
        return f"<Correlated {self._shape!r} {self._correlation:g}>"


def standard_normal(draw: Draw) -> float:
    """Mean 0, deviation 1 (Box and Muller, one of the pair: keeping the other would be state)."""
    return sqrt(-2.0 * log(1.0 - draw())) * cos(2.0 * pi * draw())

"""Histograms of a run that do not grow with it: of durations, and of chances that were claimed.

Percentiles come from logarithmic bins, a twentieth wide. `ReliabilityTally` compares the chance that was claimed with
what came.
"""

from __future__ import annotations

from collections import Counter
from math import exp, log

from tidegate.estimate.quantiles import bins_at

_WIDTH = 0.05
_FIRST_S = 1e-4
_BINS = 20


class Latencies:
    """Mutable: percentiles of many durations in constant memory."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        # Bin k holds durations from _FIRST_S · e^(k · _WIDTH) up to the next.
        self._bins[int(log(max(seconds, _FIRST_S) / _FIRST_S) / _WIDTH)] += 1

    def quantile_s(self, share: float) -> float:
        """To within a twentieth; 0 of nothing."""
        places = bins_at(self._bins, (share,))
        return _FIRST_S * exp((places[0] + 0.5) * _WIDTH) if places else 0.0


class ReliabilityTally:
    """Mutable: of the requests with such a claimed chance, how many were in time?"""

    def __init__(self) -> None:
        self.promised = [0.0] * _BINS
        self.kept = [0] * _BINS
        self.count = [0] * _BINS

    def add(self, chance: float, in_time: bool) -> None:
        place = min(_BINS - 1, int(chance * _BINS))
        self.promised[place] += chance
        self.kept[place] += in_time
        self.count[place] += 1

    @property
    def error(self) -> float:
        """Expected calibration error: the mean gap between promise and fact, weighted by how often."""
        total = sum(self.count)
        gaps = (abs(promised - kept) for promised, kept in zip(self.promised, self.kept, strict=True))
        return sum(gaps) / total if total else 0.0

    def deciles(self) -> list[tuple[float, float, int]]:
        """(mean chance claimed, share that kept it, how many) of each tenth of claims that has any."""
        step = _BINS // 10
        sums = [
            (sum(self.promised[at : at + step]), sum(self.kept[at : at + step]), sum(self.count[at : at + step]))
            for at in range(0, _BINS, step)
        ]
        return [(promised / count, kept / count, count) for promised, kept, count in sums if count]

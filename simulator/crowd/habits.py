"""The comings and goings of a simulated device: arrival, stay, departure and absence.

Stays are exponential, so that departures of a crowd are a Poisson process of a known rate, as reboots and lost links of
a large fleet are; absences are uniform. A departure is a goodbye, or, for a share of them, a power cut: then the broker
publishes the device's will.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log
from typing import Final

AWAY_S: Final = (2.0, 20.0)


@dataclass(frozen=True, slots=True)
class Habits:
    """How the devices of a crowd come and go.

    Args:
        ramp_s: the first arrivals are spread evenly over so long.
        churn_per_minute: the share of connected devices that leaves in a minute; 0: none ever leaves.
        crash_ratio: the share of departures that are power cuts.
    """

    ramp_s: float = 5.0
    churn_per_minute: float = 0.0
    crash_ratio: float = 0.5

    def arrives_after_s(self, draw: Callable[[], float]) -> float:
        return self.ramp_s * draw()

    def stay_s(self, draw: Callable[[], float]) -> float:
        if not self.churn_per_minute:
            return inf
        return -log(1.0 - draw()) * 60.0 / self.churn_per_minute

    def crashes(self, draw: Callable[[], float]) -> bool:
        return draw() < self.crash_ratio

    def away_s(self, draw: Callable[[], float]) -> float:
        least, most = AWAY_S
        return least + (most - least) * draw()

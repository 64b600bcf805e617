"""The cut level decides which requests overload refuses: those above the cut, and the same ones at each retry.

Every request has one of 500 levels, 0 first: its priority gives the band of 125, and within the band its place is
drawn by a hash of (tenant, hour, what is asked). So a retry within the hour gets the same level, and an
impatient client's retries cannot draw until they are lucky; in the next hour other requests are. What is asked
belongs to the hash because without it a fleet with a single tenant could only be cut by whole bands. Weights bend the
draw: a tenant of weight 2 is cut half as often as one of weight 1.

The cut is the quantile of recent levels at the rate at which requests have to be refused:

    refused  ⇔  level >= cut,   cut: the least level from which on at most `rejection` of recent arrivals lie

Rounding is in favour of the request. How much has to be refused is decided elsewhere (`rejection.py`).

Invariants: a more urgent band is refused only when all less urgent ones are; the cut falls (weakly) as the rate
rises; a rate of 0 refuses nothing. Recording is O(1), a new cut O(levels), once per tick.
Source: Uber, "Cinnamon: Using Century Old Tech to Build a Mean Load Shedder", 2023 (cohorts, quantile of recent
priorities at the rejection ratio); Zhou et al., "Overload Control for Scaling WeChat Microservices", SoCC 2018 (DAGOR:
levels hashed by user and hour).
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

from tidegate.priority import LAST_LEVEL

LEVELS: Final = 500
_BAND: Final = LEVELS // LAST_LEVEL
_KEEP: Final = 0.95  # of what is remembered, per tick of 50 ms: a memory of one second
_RESCALE_AT: Final = 1e9
_HOUR_S: Final = 3600.0


def level(priority_level: int, tenant: str, asked: int, now: float, weight: float = 1.0) -> int:
    """From 0 (the last to be refused) to LEVELS − 1.

    Args:
        priority_level: of `tidegate/priority.py`, 1 is the most urgent.
        asked: a fingerprint of the request that its retries share.
    """
    draw = crc32(f"{tenant}\0{int(now // _HOUR_S)}\0{asked}".encode()) / 2**32
    return _BAND * (priority_level - 1) + min(_BAND - 1, int(_BAND * draw**weight))


class CutLevel:
    """Mutable: `record` the level of each arrival, `tick` with the rate to refuse, ask `refuses`."""

    __slots__ = ("_counts", "_total", "_unit", "cut")

    def __init__(self) -> None:
        self.cut = LEVELS  # refuses nothing
        self._counts = [0.0] * LEVELS
        self._total = 0.0
        self._unit = 1.0  # what one arrival counts now: growing it ages all others at once

    def record(self, level: int) -> None:
        self._counts[level] += self._unit
        self._total += self._unit

    def refuses(self, level: int) -> bool:
        return level >= self.cut

    def tick(self, rejection: float) -> None:
        """Set the cut for refusing this share of arrivals, and age what is remembered by one tick."""
        self.cut = self._quantile(rejection)
        self._unit /= _KEEP
        if self._unit > _RESCALE_AT:
            self._counts = [count / self._unit for count in self._counts]
            self._total, self._unit = self._total / self._unit, 1.0

    def reset(self) -> None:
        """Refuse nothing from now on."""
        self.cut = LEVELS

    def _quantile(self, rejection: float) -> int:
        room, cut = rejection * self._total, LEVELS
        if room <= 0.0:
            return LEVELS
        while cut > 0 and self._counts[cut - 1] <= room:
            cut -= 1
            room -= self._counts[cut]
        return cut

    def __repr__(self) -> str:
        return f"<CutLevel {self.cut} of {LEVELS}>"

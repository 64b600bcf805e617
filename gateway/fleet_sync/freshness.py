"""How far a device's state may be believed, and the silence that is not the device's fault."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

from tidegate.fleet.conditions import UNTOLD, DeviceConditions
from tidegate.fleet.offers import ModelOffer
from tidegate.fleet.reported import Reported
from tidegate.types import LoadReport

# Silence up to this many heartbeat intervals.
FRESH_UP_TO: Final = 2
STALE_UP_TO: Final = 5
SUSPECT_UP_TO: Final = 10
JUST_AFTER_S: Final = 0.001  # the limits above still belong to the better class


class Freshness(StrEnum):
    """How far a device's state may be believed. FRESH, STALE and CONTROL_LOST take work; SUSPECT takes probes."""

    FRESH = "fresh"
    STALE = "stale"
    CONTROL_LOST = "control_lost"
    SUSPECT = "suspect"
    DEAD = "dead"

    @property
    def is_usable(self) -> bool:
        return self in (Freshness.FRESH, Freshness.STALE, Freshness.CONTROL_LOST)


@dataclass(slots=True)
class BrokerOutage:
    """The last stretch in which this gateway heard no device, because its own link to the broker was down."""

    down_at: float = inf
    up_at: float = -inf  # inf while it lasts
    over_at: float = -inf  # `up_at` and the time that devices need to come back as well

    def begin(self, now: float) -> None:
        # A broker that flaps makes one long outage: devices that have not come back in between are still excused.
        if now >= self.over_at:
            self.down_at = now
        self.up_at = self.over_at = inf

    def end(self, now: float, grace_s: float) -> None:
        self.up_at, self.over_at = now, now + grace_s

    @property
    def lasts(self) -> bool:
        return self.up_at == inf

    def excuses(self, heard_at: float, now: float) -> bool:
        """Whether the silence of a device last heard at `heard_at` is ours for a part."""
        return heard_at < self.up_at and self.down_at <= now

    def excused_s(self, heard_at: float, now: float) -> float:
        if not self.excuses(heard_at, now):
            return 0.0
        return max(0.0, min(now, self.over_at) - max(heard_at, self.down_at))


@dataclass(frozen=True, slots=True)
class DeviceView:
    """What a gateway may believe of one device now."""

    name: str
    epoch: int
    urls: tuple[str, ...]
    offers: tuple[ModelOffer, ...]
    load: LoadReport | None
    freshness: Freshness
    age_s: float  # since the device sent something by any path; for one never heard live, since its name first came
    reason: str  # why it is not FRESH; "" when it is
    accepting: bool = True
    agent: str = ""
    conditions: DeviceConditions = UNTOLD
    reported: Reported | None = None  # its rollouts, as last reported; maybe in a session before this one

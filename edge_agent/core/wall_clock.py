"""The wall clock is trusted only when a gateway's clock agrees or the system reports synchronization.

A device without a battery for its clock starts in 1970 and learns the time only when it has a network. Stored entries
age by powered time, which needs no clock; the wall clock only adds the time for which the device was off, and only
where it is known to be right: a gateway's heartbeat agrees within NEAR_S, or the system reports that it has
synchronized. A gateway that disagrees ends the trust.

It can be wrong where gateway and device are off by the same amount; ages are right even then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NEAR_S: Final = 60.0  # heartbeats may have waited in a broker; a lifetime in the store is hours


@dataclass(slots=True)
class WallClock:
    """Mutable: `heard` compares a gateway's time."""

    right: bool = False

    def heard(self, their_utc_s: float, our_utc_s: float) -> None:
        """Compare a gateway's time with ours; 0 or less means that it sent none."""
        if their_utc_s > 0:
            self.right = abs(their_utc_s - our_utc_s) <= NEAR_S

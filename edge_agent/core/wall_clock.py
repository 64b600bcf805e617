"""Whether the wall clock is right: believed when somebody else's says the same, and never by its own word.

A device without a battery for its clock starts in 1970 and finds out the time when it has a network, if then. What is
stored ages by powered time, which needs no clock at all; the wall clock only adds the time for which the device was
off, and only where it is known to be right: a gateway's heartbeat agrees within NEAR_S, or the system says that it has
synchronized. A gateway that disagrees takes the belief back.

It can be wrong where gateway and device are off by the same; then ages are right all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NEAR_S: Final = 60.0  # heartbeats may have waited in a broker; a lifetime in the store is hours


@dataclass(slots=True)
class WallClock:
    """Mutable: `heard` another's time."""

    right: bool = False

    def heard(self, their_utc_s: float, our_utc_s: float) -> None:
        """A gateway said what time it is; 0 or less: it did not."""
        if their_utc_s > 0:
            self.right = abs(their_utc_s - our_utc_s) <= NEAR_S

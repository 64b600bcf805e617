"""The wall clock is trusted while it runs as it did when a gateway's clock last agreed with it.

A device without a battery for its clock starts in 1970 and learns the time only when it has a network. Stored entries
age by powered time, which needs no clock; the wall clock only adds the time for which the device was off, and only
where it is known to be right: a gateway's heartbeat agrees within NEAR_S. A gateway that disagrees ends the trust.

An isolated device hears no gateway, so a clock that is set then (by a person, a modem, a first answer of NTP) must be
noticed without one: a step of a month would otherwise end every stored entry at once. When a gateway agrees, the
difference between wall and monotonic clock is kept. While it is the same within NEAR_S, the wall clock has not been
set; once it is another one, the wall clock is not right until a gateway agrees again, or it is set back.

It can be wrong where gateway and device are off by the same amount; ages are right even then. It distrusts a right
clock after a suspension of more than NEAR_S, in which the monotonic clock stands still, and after a slew of NTP that
has added up to NEAR_S (a day and more, at the 500 ppm of the kernel). Both cost little: entries age by powered time
alone until the next heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NEAR_S: Final = 60.0  # heartbeats may have waited in a broker; a lifetime in the store is hours


@dataclass(slots=True)
class WallClock:
    """Mutable: `heard` compares a gateway's time. `ahead_s`: of the monotonic clock when a gateway agreed last."""

    ahead_s: float | None = None

    def heard(self, their_utc_s: float, our_utc_s: float, now: float) -> None:
        """Compare a gateway's time with ours; 0 or less means that it sent none."""
        if their_utc_s > 0:
            self.ahead_s = our_utc_s - now if abs(their_utc_s - our_utc_s) <= NEAR_S else None

    def is_right(self, our_utc_s: float, now: float) -> bool:
        """Whether a gateway has agreed, and the clock was not set since."""
        return self.ahead_s is not None and abs(our_utc_s - now - self.ahead_s) <= NEAR_S

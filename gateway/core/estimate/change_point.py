"""The regime of a link, fair or foul, is found by a cumulative sum instead of a threshold on one sample.

One slow round trip says nothing on a jittering link, and an average moves too late. A CUSUM
adds up how much slower each round trip was than the calm link (the logarithm of the ratio to the windowed minimum,
less what is usual) and alarms once the sum is out of reach of chance:

    S ← clamp(S + log((rtt + c) / (calm + c)) − k, 0, h)        foul when S reaches h, fair again when it is back at 0

The sum is capped at h, so that a long storm is over as soon as a short one. A lasting change of the path stops being
foul by itself, when the windowed minimum has forgotten the old path. `c` is a timer's worth: on loopback a round trip
of 0.6 ms instead of 0.2 ms is scheduling, not weather.

It can be wrong on a link whose usual jitter is above k: that is foul all the time, and rightly believed only lately.
Source: docs/design/routing.md, "Link regime" (k = 0.5, h = 5); Page, "Continuous Inspection Schemes", Biometrika 1954.
"""

from __future__ import annotations

from math import log
from typing import Final

from gateway.core.estimate.cusum import Cusum

_USUAL: Final = 0.5  # k, in natural logarithms: a round trip of 1.65 × the calm one is usual
_ALARM: Final = 5.0  # h: some five round trips of 4.5 × the calm one
_TIMER_S: Final = 0.001


class RttRegime:
    """Mutable: `record` each round trip; `foul` is the verdict."""

    __slots__ = ("_cusum",)

    def __init__(self) -> None:
        self._cusum = Cusum(slack=_USUAL, level=_ALARM)

    @property
    def is_degraded(self) -> bool:
        return self._cusum.on

    def record(self, rtt_s: float, calm_s: float) -> bool:
        """Weigh one round trip against the calm link's; returns whether the verdict changed."""
        return self._cusum.record(log((rtt_s + _TIMER_S) / (calm_s + _TIMER_S)))

    def __repr__(self) -> str:
        return f"<RttRegime {'foul' if self.is_degraded else 'fair'} {self._cusum.sum:.1f} of {_ALARM:.1f}>"

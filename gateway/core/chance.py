"""The chance that an answer comes in time, from everything that is known of the way it will take.

    T = round trip + wait + compute     P(T <= D) = trust · Σ w Φ((D − s − busy) / spread)  over round trips s

The link is a sample (`LinkEstimate.path`), because it has two humps when it jitters; what happens at the target is one
normal distribution with the moments of its parts: compute is log-normal around its prediction, the wait is uncertain
by a share of itself, and a millisecond covers timers. A path whose acks are overdue is believed only as far as its
`trust`: the rest of the weight never arrives.

`if_silent` is the chance that is left when nothing has come for a while. The models' tails are thinner than life's: a
normal distribution is certain that what is four spreads late comes any moment. So the whole curve is scaled to the
calibrated chance first; what that leaves for never is what silence grows in favour of.

Values far from the deadline need no error function, and they are most: the sorted sample is cut by bisection, so a
chance costs a microsecond where it is clear, and some five where it is not.

Invariants: 0 <= by(t) <= trust, rising in t and in trust, falling in busy; if_silent is 0 at the deadline.
Source: routing.md B3 and B4.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import erf, exp, sqrt
from typing import Final, NamedTuple

from gateway.core.link import Path

WAIT_SPREAD: Final = 0.3  # of the wait
TIMER_SPREAD_S: Final = 0.001
_REACH: Final = 4.0  # spreads beyond which Φ is 0 or 1
_SQRT_2: Final = sqrt(2.0)
_NEVER: Final = 1e-9  # less than this share of the outcomes left: nothing is known of them


class Timing(NamedTuple):
    """How long one attempt takes, as a distribution. Immutable: a decision keeps it to explain itself later."""

    path: Path
    busy_s: float  # mean of wait + compute, with the bodies' time on the wire
    spread_s: float  # its standard deviation
    trust: float = 1.0

    def by(self, budget_s: float) -> float:
        """The chance that it takes no longer than `budget_s`."""
        path, spread_s, trust = self.path, self.spread_s, self.trust
        room_s, reach_s = budget_s - self.busy_s, _REACH * spread_s
        values_s = path.values_s
        # The two ends decide most cases: every round trip leaves room, or none does.
        if room_s - values_s[-1] >= reach_s:
            return trust
        if room_s - values_s[0] <= -reach_s:
            return 0.0
        first = bisect_right(values_s, room_s - reach_s)
        last = bisect_left(values_s, room_s + reach_s)
        scale, total = 1.0 / (_SQRT_2 * spread_s), path.below[first] + path.below[last]
        for value_s, weight in zip(values_s[first:last], path.weights[first:last], strict=True):
            total += weight * erf((room_s - value_s) * scale)
        return max(0.0, min(trust, 0.5 * trust * total))


def timing(
    path: Path, wait_s: float, compute_s: float, sigma: float, *, wire_s: float = 0.0, trust: float = 1.0
) -> Timing:
    """The distribution of an attempt's time.

    Args:
        compute_s: the median prediction; `sigma` is the standard deviation of its logarithm.
        wire_s: the bodies' time on the wire, beyond the round trip.
    """
    skew = exp(sigma * sigma)
    mean_s = compute_s * sqrt(skew)
    spread_s = sqrt(mean_s * mean_s * (skew - 1.0) + (WAIT_SPREAD * wait_s) ** 2 + TIMER_SPREAD_S * TIMER_SPREAD_S)
    return Timing(path, wire_s + wait_s + mean_s, spread_s, trust)


def if_silent(by_now: float, by_deadline: float, claimed: float) -> float:
    """The chance of an answer by the deadline, given that none is here yet.

    Args:
        by_now, by_deadline: the raw chances at the two instants.
        claimed: the calibrated chance at the deadline.
    """
    if by_deadline <= 0.0:
        return 0.0
    scaled = by_now * min(1.0, claimed / by_deadline)
    left = 1.0 - scaled
    return max(0.0, claimed - scaled) / left if left > _NEVER else 0.0

"""The completion time of an attempt is a distribution, from which the chance of an answer in time is read.

    T = round trip + wait + compute     P(T <= D) = trust · Σ w Φ((D − s − busy) / spread)  over round trips s

The link is a sample (`LinkEstimate.path`), because it has two humps when it jitters; what happens at the target is one
normal distribution with the moments of its parts: compute is log-normal around its prediction, and the wait is as
uncertain as waits have been there (`wait_error.py`). A path whose acks are overdue is believed only as far as its
`trust`: the rest of the weight never arrives.

What waits for a slot that some other one has to leave waits for ends, whose number and instants are about those of a
Poisson process: its wait is a gamma distribution, of a shape of 1 at least (one end). A normal one with such a spread
would have a good part of its weight below nothing, and promise in half a second what takes a quarter of a minute.

`unacknowledged` is the chance that is left when not even the accept-ack has come: only the round trips that take longer
than the silence are still possible, and beside them that the path is broken.

`chance_after_silence` is the chance that is left when nothing has come for a while. The models' tails are thinner than
real ones: a normal distribution is certain that what is four spreads late comes any moment. So the whole curve is
scaled to the calibrated chance first, and the weight that this leaves for "never" grows with the silence.

Values far from the deadline need no error function, and they are most: the sorted sample is cut by bisection, so a
chance costs a microsecond where it is clear, and some five where it is not.

Invariants: 0 <= by(t) <= trust, rising in t and in trust, falling in busy; `chance_after_silence` is 0 at the deadline.
Source: docs/design/routing.md, "Chance and calibration" and "Hedging". Wilson and Hilferty, "The Distribution of
Chi-Square", PNAS 1931.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import erf, exp, sqrt
from typing import Final, NamedTuple

from gateway.core.estimate.link_estimate import RttDistribution

_REACH: Final = 4.0  # spreads beyond which Φ is 0 or 1
_SQRT_2: Final = sqrt(2.0)
_ROUNDING: Final = 1e-9  # what a sum over a sample may be off
_THIRD: Final = 1.0 / 3.0
_LEAST_SHAPE: Final = 1.0  # of a gamma distribution: the wait for one end, which is about exponential
_NEVER: Final = 1e-9  # less than this share of the outcomes left: nothing is known of them


class CompletionTime(NamedTuple):
    """How long one attempt takes, as a distribution. Immutable: a decision keeps it to explain itself later."""

    path: RttDistribution
    busy_s: float  # mean of wait + compute, with the bodies' time on the wire
    spread_s: float  # its standard deviation
    trust: float = 1.0
    skewed: bool = False  # a gamma distribution and not a normal one

    def by(self, budget_s: float) -> float:
        """The chance that it takes no longer than `budget_s`."""
        path, spread_s, trust = self.path, self.spread_s, self.trust
        if self.skewed:
            return self._by_skewed(budget_s)
        room_s, reach_s = budget_s - self.busy_s, _REACH * spread_s
        values_s = path.values_s
        # The two ends decide most cases: every round trip leaves room, or none does.
        if room_s - values_s[-1] >= reach_s:
            return trust
        if room_s - values_s[0] <= -reach_s:
            return 0.0
        first = bisect_right(values_s, room_s - reach_s)
        last = bisect_left(values_s, room_s + reach_s)
        # ½ Σ w (1 + erf): erf is 1 below `first`, its own for each round trip up to `last`, and −1 above. `below` holds
        # the weight below a place, so the constants of the sum are below[first] + below[last].
        scale, total = 1.0 / (_SQRT_2 * spread_s), path.below[first] + path.below[last]
        for value_s, weight in zip(values_s[first:last], path.weights[first:last], strict=True):
            total += weight * erf((room_s - value_s) * scale)
        return max(0.0, min(trust, 0.5 * trust * total))

    def _by_skewed(self, budget_s: float) -> float:
        busy_s, path = self.busy_s, self.path
        values_s = path.values_s
        ninth, deviation = self._cube_root()
        # As in `by`: round trips before `first` leave room for certain, and those from `last` on leave none.
        first = bisect_right(values_s, budget_s - busy_s * (1.0 - ninth + _REACH * deviation) ** 3)
        last = bisect_left(values_s, budget_s - busy_s * max(0.0, 1.0 - ninth - _REACH * deviation) ** 3)
        scale, centre = 1.0 / (_SQRT_2 * deviation), (1.0 - ninth) / (_SQRT_2 * deviation)
        total = path.below[first] + path.below[last]
        for value_s, weight in zip(values_s[first:last], path.weights[first:last], strict=True):
            total += weight * erf(((budget_s - value_s) / busy_s) ** _THIRD * scale - centre)
        return max(0.0, min(self.trust, 0.5 * self.trust * total))

    def _cube_root(self) -> tuple[float, float]:
        """1 − the mean, and the standard deviation, of the cube root of a gamma variable over its mean.

        Wilson and Hilferty: that root is about normal, with these moments.
        """
        ninth = min(_LEAST_SHAPE, (self.spread_s / self.busy_s) ** 2) / 9.0  # 1 / (9 · shape)
        return ninth, sqrt(ninth)

    def _busy_by(self, room_s: float) -> float:
        """The chance that wait and compute take no longer than `room_s`."""
        if not self.skewed:
            return _normal((room_s - self.busy_s) / self.spread_s)
        if room_s <= 0.0:
            return 0.0
        ninth, deviation = self._cube_root()
        return _normal(((room_s / self.busy_s) ** _THIRD - 1.0 + ninth) / deviation)

    def at_most(self, budget_s: float) -> float:
        """No less than `by`, for a tenth of its price: the chance if every round trip were as short as the shortest."""
        return min(self.trust, self.trust * self._busy_by(budget_s - self.path.values_s[0]) + _ROUNDING)

    def unacknowledged(self, silence_s: float, budget_s: float, broken: float) -> float:
        """The chance to take no longer than `budget_s`, given that not even an accept-ack came within `silence_s`.

        Args:
            broken: the chance, before any silence, that the path is dead.
        """
        values_s = self.path.values_s
        first = bisect_right(values_s, silence_s)
        if first == len(values_s):  # longer than any round trip that was seen
            slower = self.path.slower_than(silence_s)
            return slower / (slower + broken) * self._busy_by(budget_s - 1.25 * silence_s)  # a quarter longer still
        in_time = sum(
            weight * self._busy_by(budget_s - value_s)
            for value_s, weight in zip(values_s[first:], self.path.weights[first:], strict=True)
        )
        return in_time / (1.0 - self.path.below[first] + broken)


def _normal(sigmas: float) -> float:
    if sigmas >= _REACH:
        return 1.0
    return 0.0 if sigmas <= -_REACH else 0.5 + 0.5 * erf(sigmas / _SQRT_2)


def completion_time(
    path: RttDistribution,
    wait_s: float,
    wait_variance: float,
    compute_s: float,
    sigma: float,
    *,
    wire_s: float = 0.0,
    trust: float = 1.0,
    skewed: bool = False,
) -> CompletionTime:
    """The distribution of an attempt's time.

    Args:
        wait_s, wait_variance: mean and variance of the time in the queue.
        compute_s: the median prediction; `sigma` is the standard deviation of its logarithm.
        wire_s: the bodies' time on the wire, beyond the round trip.
        skewed: the wait is for a slot (`CompletionTime.skewed`).
    """
    skew = exp(sigma * sigma)
    mean_s = compute_s * sqrt(skew)  # of a log-normal with this median
    # variance of compute, (e^σ² − 1) · mean², and of the wait: independent
    spread_s = sqrt(mean_s * mean_s * (skew - 1.0) + wait_variance)
    return CompletionTime(path, wire_s + wait_s + mean_s, spread_s, trust, skewed)


def chance_after_silence(by_now: float, by_deadline: float, claimed: float) -> float:
    """The chance of an answer by the deadline, given that none is here yet.

    Args:
        by_now, by_deadline: the raw chances at the two instants.
        claimed: the calibrated chance at the deadline.
    """
    if by_deadline <= 0.0:
        return 0.0
    scaled = by_now * min(1.0, claimed / by_deadline)  # the chance that it had come by now, on the calibrated curve
    left = 1.0 - scaled
    return max(0.0, claimed - scaled) / left if left > _NEVER else 0.0

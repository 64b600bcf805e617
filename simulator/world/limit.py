"""A fixed concurrency limit for baselines, with an estimate of when a refused caller should come back.

The algorithm is apart from its enforcement: `ConcurrencyLimit` counts and estimates, `FixedLimitAdmission` refuses. A
full limit has room again within about one mean stay, so that is the `retry_after_s` of a refusal, within bounds that
keep a cold estimate from sending callers away for long or back at once. The gateway's own limit adapts
(`gateway/core/admission/concurrency.py`).

Invariant: never more than `max_in_flight` between acquire and release.
Prior art: Netflix concurrency-limits (algorithm apart from enforcement).
"""

from __future__ import annotations

from typing import Final

_STAY_WEIGHT: Final = 0.05  # a mean over some 20 stays
_SHORTEST_S: Final = 0.05
_LONGEST_S: Final = 30.0


class ConcurrencyLimit:
    """Mutable: `try_acquire` before, `release` after, once each."""

    __slots__ = ("_mean_stay_s", "in_flight", "max_in_flight", "refused")

    def __init__(self, max_in_flight: int) -> None:
        if max_in_flight < 1:
            raise ValueError(f"a limit must let at least one in, not {max_in_flight}")
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self.refused = 0
        self._mean_stay_s = 0.0

    def try_acquire(self) -> bool:
        """Take a place if there is one."""
        if self.in_flight >= self.max_in_flight:
            self.refused += 1
            return False
        self.in_flight += 1
        return True

    def release(self, stayed_s: float) -> None:
        """Give the place back; `stayed_s` is how long it was held."""
        self.in_flight -= 1
        self._mean_stay_s += _STAY_WEIGHT * (stayed_s - self._mean_stay_s)

    @property
    def retry_after_s(self) -> float:
        """When a refused caller should find room."""
        return min(_LONGEST_S, max(_SHORTEST_S, self._mean_stay_s))

    def __repr__(self) -> str:
        return f"<ConcurrencyLimit {self.in_flight}/{self.max_in_flight} in flight, {self.refused} refused>"

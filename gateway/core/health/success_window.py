"""The success window counts a target's successes and failures of the last ten seconds, in buckets of one second.

A decayed average cannot tell one failure of two from a hundred of two hundred; a breaker must, since it acts on a
share only when enough calls stand behind it. Ten pairs of counts are exact, forget in steps of a second, and cost the
same at any rate.

Invariants: counts are never negative; what is older than ten seconds counts for nothing. O(1) to record, O(10) to read.
Source: docs/design/routing.md, "Breakers" (exact-count ring, 10 × 1 s); Hystrix's rolling window.
"""

from __future__ import annotations

from typing import Final

_BUCKETS: Final = 10
_BUCKET_S: Final = 1.0


class SuccessWindow:
    """Mutable: `add` in order of time."""

    __slots__ = ("_bad", "_good", "_latest")

    def __init__(self) -> None:
        self._good = [0] * _BUCKETS
        self._bad = [0] * _BUCKETS
        self._latest = 0  # the number of the newest bucket, counted from the clock's zero

    def add(self, now: float, *, success: bool) -> None:
        bucket = int(now / _BUCKET_S)
        if bucket > self._latest:
            self._turn(now)
        (self._good if success else self._bad)[self._latest % _BUCKETS] += 1

    def counts(self, now: float) -> tuple[int, int]:
        """(successes, failures) of the last ten seconds."""
        self._turn(now)
        return sum(self._good), sum(self._bad)

    def clear(self) -> None:
        self._good = [0] * _BUCKETS
        self._bad = [0] * _BUCKETS

    def _turn(self, now: float) -> None:
        bucket = int(now / _BUCKET_S)
        if bucket <= self._latest:
            return
        for stale in range(max(self._latest + 1, bucket - _BUCKETS + 1), bucket + 1):
            self._good[stale % _BUCKETS] = self._bad[stale % _BUCKETS] = 0
        self._latest = bucket

    def __repr__(self) -> str:
        return f"<SuccessWindow {sum(self._good)} good, {sum(self._bad)} bad>"

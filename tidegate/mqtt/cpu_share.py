"""`TimeShare` limits work that others send to a share of the time, however much of it they send.

A peer that may send messages to a process may send it too many, and reading them runs beside answering requests. So
such work keeps account of its own time: it may run on for a burst, then as long as its share allows, and must pause for
the rest. The messages that pile up meanwhile are bounded elsewhere: by a queue that keeps the newest, by a socket that
is not read.

A token bucket of seconds: `share` flow in per second, at most `burst_s` are kept, work takes out what it took.
"""

from __future__ import annotations

from typing import Final

LONGEST_PAUSE_S: Final = 0.25  # whatever the debt: a pause is no outage


class DutyCycle:
    """Mutable: `spend` after each piece of work."""

    __slots__ = ("_at", "_burst_s", "_left_s", "_share")

    def __init__(self, share: float, *, burst_s: float) -> None:
        self._share = share
        self._burst_s = burst_s
        self._left_s = burst_s
        self._at = float("-inf")

    def spend(self, began_at: float, ended_at: float) -> float:
        """Note a piece of work; the seconds to pause before the next."""
        self._left_s = min(self._burst_s, self._left_s + self._share * max(0.0, ended_at - self._at))
        self._at = ended_at
        self._left_s = max(self._left_s - (ended_at - began_at), -self._share * LONGEST_PAUSE_S)
        return max(0.0, -self._left_s / self._share)

    def __repr__(self) -> str:
        return f"<DutyCycle {self._share:.0%}, {self._left_s * 1e3:.0f} of {self._burst_s * 1e3:.0f} ms left>"

"""How old is what a device last said, when its clock and ours have nothing in common?

A message made at the device's monotonic time `m` and received at our `t` was under way for some unknown time, so
`t − m` is the difference of the clocks plus that time. The least `t − m` of a window is the difference of the clocks
plus the least time under way: good enough to date every message by its own `m`, however late it comes in.

    offset = min over about a minute of (t − m)        said_at = m_newest + offset        age = now − said_at

Invariants: order of arrival and duplicates change nothing (a maximum and a minimum); what was said is never dated later
than it was received, so a replayed message cannot make a silent device look fresh. The window lets go of an offset that
clock drift (200 ppm, 12 ms a minute) has made wrong. O(1) time and memory: two buckets stand for the sliding window.
"""

from __future__ import annotations

from math import inf


class ClocklessAge:
    """Dates of one device's session; a new session starts a new one."""

    __slots__ = (
        "_bucket_ends_at", "_current", "_half_window_s", "_newest_m", "_newest_received_at", "_previous", "said_at",
    )  # fmt: skip

    def __init__(self, window_s: float = 60.0) -> None:
        self.said_at: float | None = None  # our instant at which the device made its newest message; None before any
        self._half_window_s = window_s / 2
        self._bucket_ends_at = -inf
        self._current = inf
        self._previous = inf
        self._newest_m = -inf
        self._newest_received_at = inf

    def record(self, m: float, received_at: float) -> None:
        """A message made at the device's `m` seconds arrived at `received_at`."""
        if received_at >= self._bucket_ends_at:
            self._previous, self._current = self._current, inf
            self._bucket_ends_at = received_at + self._half_window_s
        self._current = min(self._current, received_at - m)
        if m > self._newest_m:
            self._newest_m, self._newest_received_at = m, received_at
        elif m == self._newest_m:
            self._newest_received_at = min(self._newest_received_at, received_at)
        # Kept, since each message is asked for it many times, by whatever the clock changes.
        self.said_at = min(self._newest_m + min(self._current, self._previous), self._newest_received_at)

    def __repr__(self) -> str:
        return f"<ClocklessAge said at {self.said_at}>"

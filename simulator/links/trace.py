"""Recorded capacity: a Mahimahi trace says at which millisecond 1,500 more bytes could leave.

An opportunity that finds nothing to send is lost, as on the air; what is left of one is used by whatever comes before
the next. The recording repeats from its last timestamp for ever, may begin anywhere (`offset_s`) and be made wider or
narrower (`scale` multiplies the bytes of an opportunity, so the pattern stays).

A trace has capacity only: put a `Delay` before it. A link under load delivers exactly the recorded volume.

Source: Netravali et al., "Mahimahi: Accurate Record-and-Replay for HTTP", USENIX ATC 2015, and its `mm-link`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import ceil

OPPORTUNITY_BYTES = 1500


class Trace:
    """The recording, shared by all links that replay it. Times in seconds, not decreasing."""

    __slots__ = ("period_s", "times_s")

    def __init__(self, times_s: Sequence[float]) -> None:
        if not times_s or any(later < earlier for earlier, later in pairwise(times_s)):
            raise ValueError("a trace needs at least one time, and its times must not decrease")
        if not (times_s[0] >= 0.0 and times_s[-1] > 0.0):
            raise ValueError("a trace must not begin before 0, and must last longer than 0")
        self.times_s = list(times_s)
        self.period_s = self.times_s[-1]

    @classmethod
    def parse(cls, text: str) -> Trace:
        """Read Mahimahi's format: one integer of milliseconds a line.

        Raises:
            ValueError: naming the line.
        """
        times_s: list[float] = []
        for number, line in enumerate(text.split("\n"), 1):
            if word := line.strip():
                if not word.isdigit():
                    raise ValueError(f"line {number}: not a time in whole milliseconds: {word[:40]!r}")
                times_s.append(int(word) / 1e3)
        return cls(times_s)

    @property
    def mean_bytes_per_s(self) -> float:
        return OPPORTUNITY_BYTES * len(self.times_s) / self.period_s

    def time_of(self, opportunity: int) -> float:
        """When the opportunity of this number comes, counted through all rounds from 0."""
        around, place = divmod(opportunity, len(self.times_s))
        return around * self.period_s + self.times_s[place]

    def first_at_or_after(self, at: float) -> int:
        """The number of the first opportunity that does not come before `at`."""
        if at <= 0.0:
            return 0
        around = int(at / self.period_s)
        # The last opportunity of a round comes when the next round begins; float division may land on either side.
        for candidate in (around - 1, around, around + 1):
            if candidate >= 0:
                place = bisect_left(self.times_s, at - candidate * self.period_s - 1e-12)
                if place < len(self.times_s):
                    return candidate * len(self.times_s) + place
        raise AssertionError("unreachable: a round after `at` has opportunities")

    def __repr__(self) -> str:
        return f"<Trace {self.period_s:.1f} s, {self.mean_bytes_per_s * 8e-6:.2f} Mbit/s>"


class TraceRate:
    """A stage. Mutable: remembers which opportunity it has come to, and what is left of it."""

    __slots__ = ("_left_bytes", "_next", "_offset_s", "_per_opportunity", "_trace")

    def __init__(self, trace: Trace, *, offset_s: float = 0.0, scale: float = 1.0) -> None:
        if not (scale > 0.0 and offset_s >= 0.0):
            raise ValueError(f"scale {scale} must be positive, and the offset {offset_s} s not negative")
        self._trace = trace
        self._offset_s = offset_s
        self._per_opportunity = OPPORTUNITY_BYTES * scale
        self._next = 0
        self._left_bytes = self._per_opportunity  # of the opportunity `_next`

    def leaves_at(self, size_bytes: int, enters_at: float) -> float:
        trace = self._trace
        first = trace.first_at_or_after(enters_at + self._offset_s)
        if first > self._next:
            self._next, self._left_bytes = first, self._per_opportunity
        if size_bytes > self._left_bytes:
            further = ceil((size_bytes - self._left_bytes) / self._per_opportunity)
            self._next += further
            self._left_bytes += further * self._per_opportunity
        self._left_bytes -= size_bytes
        leaves_at = trace.time_of(self._next) - self._offset_s
        if self._left_bytes <= 0.0:
            self._next, self._left_bytes = self._next + 1, self._per_opportunity
        return max(enters_at, leaves_at)

    def __repr__(self) -> str:
        return f"<TraceRate {self._trace!r} x{self._per_opportunity / OPPORTUNITY_BYTES:g} from {self._offset_s:g} s>"

"""Recorded capacity: a Mahimahi trace names the milliseconds at which 1,500 more bytes could leave.

An opportunity that finds nothing to send is lost, as on the air; what is left of one is used by whatever comes before
the next. The recording repeats from its last timestamp for ever, may begin anywhere (`offset_s`) and be made wider or
narrower (`scale` multiplies the bytes of an opportunity, so the pattern stays).

A CSV of measured rates is read into the same opportunities, 1,500 bytes each. What does not fit into the queue (none
by default, which is Mahimahi's) is held back or sent again, as `rate.py` says.

A trace has capacity only: put a `Delay` before it. A link under load delivers exactly the recorded volume.

Source: Netravali et al., "Mahimahi: Accurate Record-and-Replay for HTTP", USENIX ATC 2015, and its `mm-link`.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, inf

from tidegate.netsim.links.rate import FIRST_RTO_S, LAST_RTO_S, Overflow

OPPORTUNITY_BYTES = 1500
_OPPORTUNITIES_MAX = 50_000_000  # of a CSV: 60 GB a round is a wrong unit, not a radio


class CapacityTrace:
    """The recording, shared by all links that replay it. Times in seconds, not decreasing.

    Args:
        loops: whether it begins anew after its end; else nothing leaves any more.
        period_s: its length, where that is not its last time.
    """

    __slots__ = ("loops", "period_s", "times_s")

    def __init__(self, times_s: Sequence[float], *, loops: bool = True, period_s: float | None = None) -> None:
        if not times_s or any(later < earlier for earlier, later in pairwise(times_s)):
            raise ValueError("a trace needs at least one time, and its times must not decrease")
        if not (times_s[0] >= 0.0 and times_s[-1] > 0.0):
            raise ValueError("a trace must not begin before 0, and must last longer than 0")
        self.times_s = list(times_s)
        self.period_s = max(self.times_s[-1], period_s or 0.0)
        self.loops = loops

    @classmethod
    def parse(cls, text: str, *, loops: bool = True) -> CapacityTrace:
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
        return cls(times_s, loops=loops)

    @classmethod
    def parse_csv(cls, text: str, *, column: str = "mbit", loops: bool = True) -> CapacityTrace:
        """Read rates: a header line, a column `s` of seconds and one of Mbit/s; each holds until the next line.

        The last line only ends the recording.

        Raises:
            ValueError: naming the line or the column.
        """
        rows = list(csv.DictReader(text.splitlines()))
        if not rows or not {"s", column} <= rows[0].keys():
            found = ", ".join(rows[0]) if rows else "nothing"
            raise ValueError(f"a CSV of rates needs a line of names with 's' and {column!r} in it; it has {found}")
        return cls.of_rates(
            (_numbers(number, row["s"], row[column]) for number, row in enumerate(rows, 2)), loops=loops
        )

    @classmethod
    def of_rates(cls, rates: Iterable[tuple[float, float]], *, loops: bool = True) -> CapacityTrace:
        """From (second, Mbit/s) pairs, each of which holds until the next; the last only ends the recording."""
        steps = list(rates)
        if len(steps) < 2 or any(mbit < 0.0 for _, mbit in steps):
            raise ValueError("rates need at least two lines, the last to end them, and none below 0")
        begin_s = steps[0][0]
        times_s: list[float] = []
        credit_bytes = 0.0  # carried over, so that slow stretches do not lose their fractions
        for (at_s, mbit), (until_s, _) in pairwise(steps):
            if until_s < at_s:
                raise ValueError(f"seconds must not decrease: {until_s:g} comes after {at_s:g}")
            bytes_per_s = mbit * 125e3
            whole, rest = divmod(credit_bytes + bytes_per_s * (until_s - at_s), OPPORTUNITY_BYTES)
            if len(times_s) + whole > _OPPORTUNITIES_MAX:
                raise ValueError(f"{mbit:g} Mbit/s for {until_s - at_s:g} s is more than a recording can hold")
            due_bytes = (OPPORTUNITY_BYTES * (count + 1) - credit_bytes for count in range(int(whole)))
            times_s += [at_s - begin_s + due / bytes_per_s for due in due_bytes]
            credit_bytes = rest
        return cls(times_s, loops=loops, period_s=steps[-1][0] - begin_s)

    @property
    def mean_bytes_per_s(self) -> float:
        return OPPORTUNITY_BYTES * len(self.times_s) / self.period_s

    def time_of(self, opportunity: int) -> float:
        """When the opportunity of this number comes, counted through all rounds from 0."""
        around, place = divmod(opportunity, len(self.times_s))
        if around and not self.loops:
            return inf
        return around * self.period_s + self.times_s[place]

    def first_at_or_after(self, at: float) -> int:
        """The number of the first opportunity that does not come before `at`."""
        if at <= 0.0:
            return 0
        if not self.loops and at > self.times_s[-1]:
            return len(self.times_s)
        around = int(at / self.period_s)
        # The last opportunity of a round comes when the next round begins; float division may land on either side.
        for candidate in (around - 1, around, around + 1):
            if candidate >= 0:
                place = bisect_left(self.times_s, at - candidate * self.period_s - 1e-12)
                if place < len(self.times_s):
                    return candidate * len(self.times_s) + place
        raise AssertionError("unreachable: a round after `at` has opportunities")

    def __repr__(self) -> str:
        return f"<CapacityTrace {self.period_s:.1f} s, {self.mean_bytes_per_s * 8e-6:.2f} Mbit/s>"


class TraceRate:
    """A stage. Mutable: remembers which opportunity it has come to, and what is left of it.

    Args:
        offset_s: where in the recording it begins.
        starts_at: the instant at which it begins there.
    """

    __slots__ = (
        "_left_bytes", "_next", "_offset_s", "_overflow", "_per_opportunity", "_queue", "_queue_bytes", "_queued_bytes",
        "_trace", "retransmissions",
    )  # fmt: skip

    def __init__(
        self,
        trace: CapacityTrace,
        *,
        offset_s: float = 0.0,
        scale: float = 1.0,
        queue_bytes: float = inf,
        overflow: Overflow = "stall",
        starts_at: float = 0.0,
    ) -> None:
        if not (scale > 0.0 and offset_s >= 0.0):
            raise ValueError(f"scale {scale} must be positive, and the offset {offset_s} s not negative")
        self._trace = trace
        self._offset_s = offset_s - starts_at
        self._queue_bytes = queue_bytes
        self._overflow = overflow
        self._queue: deque[tuple[float, int]] = deque()  # (leaves at, bytes); kept only where the queue has an end
        self._queued_bytes = 0
        self.retransmissions = 0
        self._per_opportunity = OPPORTUNITY_BYTES * scale
        self._next = 0
        self._left_bytes = self._per_opportunity  # of the opportunity `_next`

    def leaves_at(self, size_bytes: int, enters_at: float) -> float:
        if self._queue_bytes == inf:
            return self._served_at(size_bytes, enters_at)
        if self._overflow == "drop":
            enters_at = self.enters_at(size_bytes, enters_at)
        leaves_at = self._served_at(size_bytes, enters_at)
        self._queue.append((leaves_at, size_bytes))
        self._queued_bytes += size_bytes
        return leaves_at

    def queued_bytes(self, now: float) -> float:
        """What has entered and not left; always 0 where the queue has no end."""
        while self._queue and self._queue[0][0] <= now:
            self._queued_bytes -= self._queue.popleft()[1]
        return self._queued_bytes

    def room_bytes(self, now: float) -> float:
        """How much may be sent now without an overflow."""
        return max(0.0, self._queue_bytes - self.queued_bytes(now))

    def enters_at(self, size_bytes: int, now: float) -> float:
        """When as many may enter: `now` if they fit, else when the sender may try again."""
        fitting_bytes = max(0.0, self._queue_bytes - size_bytes)
        if self.queued_bytes(now) <= fitting_bytes:
            return now
        room_at = self._room_at(fitting_bytes)
        if self._overflow == "stall" or room_at == inf:
            return room_at
        waited_s, rto_s = 0.0, FIRST_RTO_S
        while now + waited_s < room_at:
            self.retransmissions += 1
            waited_s += rto_s
            rto_s = min(2.0 * rto_s, LAST_RTO_S)
        return now + waited_s

    def restart(self, now: float) -> None:
        """Whatever has not left will enter again: the link has changed under it."""
        self._next, self._left_bytes = self._trace.first_at_or_after(now + self._offset_s), self._per_opportunity
        self._queue.clear()
        self._queued_bytes = 0

    def segment_bytes(self) -> int:
        """How finely a stream should be cut, so that its bytes come spread over time as recorded."""
        return max(1, int(self._per_opportunity))

    def next_segment_bytes(self) -> int:
        """What the opportunity that is next still takes: a segment that fits it waits for no second one."""
        return max(1, int(self._left_bytes))

    def _room_at(self, fitting_bytes: float) -> float:
        """When at most so many of those that are queued now are still there."""
        left_bytes = self._queued_bytes
        for leaves_at, size_bytes in self._queue:
            left_bytes -= size_bytes
            if left_bytes <= fitting_bytes:
                return leaves_at
        raise AssertionError("unreachable: an empty queue has room")

    def _served_at(self, size_bytes: int, enters_at: float) -> float:
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


def _numbers(line: int, *words: str | None) -> tuple[float, float]:
    try:
        first, second = (float(word or "") for word in words)
    except ValueError as error:
        raise ValueError(f"line {line}: not numbers: {', '.join(str(word)[:40] for word in words)}") from error
    return first, second

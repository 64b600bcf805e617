"""Capacity: bytes leave one after another at a fixed rate, and wait in a queue that has an end.

All connections of a link share one `Rate`, since it is the radio that is full and not the connection (a limit per
connection, as Toxiproxy has it, is no link). What does not fit into the queue is, by choice,

    stall   not taken yet: the sender is held back, as by a full socket buffer. `room_bytes` and `enters_at` say so
            beforehand.
    drop    lost and sent again after a retransmission timeout that doubles, as TCP does over a tail-drop queue.

Either way the bytes get there, in order: nothing here destroys any.
"""

from __future__ import annotations

from math import inf
from typing import Literal

Overflow = Literal["stall", "drop"]
_PACKET_BYTES, _SEGMENT_S = 1500, 1e-3
FIRST_RTO_S, LAST_RTO_S = 0.2, 6.4  # RFC 6298's least in practice (Linux), doubled five times


class Rate:
    """A stage. Mutable: remembers until when it is busy."""

    __slots__ = ("_busy_until", "_bytes_per_s", "_overflow", "_queue_bytes", "retransmissions")

    def __init__(self, bytes_per_s: float, *, queue_bytes: float = inf, overflow: Overflow = "stall") -> None:
        if not bytes_per_s > 0.0:
            raise ValueError(f"a rate must be positive, not {bytes_per_s} bytes/s; an outage is a stage of its own")
        self._bytes_per_s = bytes_per_s
        self._queue_bytes = queue_bytes
        self._overflow = overflow
        self._busy_until = -inf
        self.retransmissions = 0

    def leaves_at(self, size_bytes: int, enters_at: float) -> float:
        if self._overflow == "drop":
            enters_at = self._enters_at_last(size_bytes, enters_at)
        # A busy link begins with these bytes when the bytes before them have left, an idle one at once.
        self._busy_until = max(self._busy_until, enters_at) + size_bytes / self._bytes_per_s
        return self._busy_until

    def queued_bytes(self, now: float) -> float:
        """What has entered and not left."""
        return max(0.0, self._busy_until - now) * self._bytes_per_s

    def room_bytes(self, now: float) -> float:
        """How much may be sent now without an overflow."""
        return max(0.0, self._queue_bytes - self.queued_bytes(now))

    def enters_at(self, size_bytes: int, now: float) -> float:
        """When as many may enter: `now` if they fit, else when the sender may try again."""
        fitting_bytes = max(0.0, self._queue_bytes - size_bytes)
        if self.queued_bytes(now) <= fitting_bytes:
            return now
        if self._overflow == "drop":
            return self._enters_at_last(size_bytes, now)
        # A little later than exactly: rounding must not let it find the queue full by a millionth of a byte.
        return self._busy_until - fitting_bytes / self._bytes_per_s + 1e-9

    def restart(self, now: float) -> None:
        """Whatever has not left will enter again: the link has changed under it."""
        self._busy_until = min(self._busy_until, now)

    def segment_bytes(self) -> int:
        """How finely a stream should be cut, so that its bytes come spread over time as the rate says."""
        return max(_PACKET_BYTES, int(self._bytes_per_s * _SEGMENT_S))

    def next_segment_bytes(self) -> int:
        return self.segment_bytes()

    def _enters_at_last(self, size_bytes: int, enters_at: float) -> float:
        """When it is taken after all. Larger than the whole queue: when that is empty."""
        fitting_bytes = max(0.0, self._queue_bytes - size_bytes)
        rto_s = FIRST_RTO_S
        while self.queued_bytes(enters_at) > fitting_bytes:
            self.retransmissions += 1
            enters_at += rto_s
            rto_s = min(2.0 * rto_s, LAST_RTO_S)
        return enters_at

    def __repr__(self) -> str:
        return f"<Rate {self._bytes_per_s * 8e-6:g} Mbit/s, queue of {self._queue_bytes:g} bytes>"

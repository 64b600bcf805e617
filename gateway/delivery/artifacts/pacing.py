"""So many bytes a second over all who read, in the order in which they ask.

Each piece that somebody wants to send takes its place on one line of time that is as long as the piece takes at the
agreed rate. Pieces are of one size, so readers get equal shares, whoever has the faster link, and a reader that went
away leaves no debt.

Invariant: in any span of t seconds at most rate × t bytes and one piece for each reader are let go.
"""

from __future__ import annotations

from math import inf


class BytePacer:
    """Mutable: `wait_s` books the next piece."""

    def __init__(self, bytes_per_s: float = inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = -inf

    def wait_s(self, size_bytes: int, now: float) -> float:
        """How long to wait before sending a piece of this size."""
        begin_at = max(now, self._free_at)
        self._free_at = begin_at + size_bytes / self.bytes_per_s
        return begin_at - now

    def __repr__(self) -> str:
        return f"<BytePacer {self.bytes_per_s:g} bytes/s>"

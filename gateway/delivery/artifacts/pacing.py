"""The byte pacer limits the rate of all downloads together, in the order in which their pieces are announced.

Each piece books the next free stretch of one timeline, as long as the piece takes at the configured rate. Pieces are
of one size, so downloads get equal shares however fast their links are, and a download that is cut leaves no debt.

Invariant: in any span of t seconds at most rate × t bytes are sent, and one piece more for each download.
"""

from __future__ import annotations

from math import inf


class BytePacer:
    """One rate shared by all downloads. Mutable: `wait_s` books the next piece."""

    def __init__(self, bytes_per_s: float = inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = -inf

    def wait_s(self, size_bytes: int, now: float) -> float:
        """Book a piece of this size and return how long to wait before sending it."""
        begin_at = max(now, self._free_at)
        self._free_at = begin_at + size_bytes / self.bytes_per_s
        return begin_at - now

    def __repr__(self) -> str:
        return f"<BytePacer {self.bytes_per_s:g} bytes/s>"

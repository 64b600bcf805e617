"""Moments are whole snapshots of the last five minutes, so that the console's timeline can go back to any of them.

An operator who opens the console after something went wrong wants to see what it was like then. So a snapshot is kept
every `EVERY_S` also while the console has no reader. Of a large fleet a snapshot holds few targets by name
(`snapshot.py`), so it is some ten kilobytes, and a few when compressed: the memory of all is under half a megabyte.

Invariants: at most `KEPT` moments, oldest first, each at a later instant than the one before; a clock that jumps back
takes what lies after it out of the history.
Source: none; the sampling follows `ConsoleHistory`.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from typing import Final

EVERY_S: Final = 5.0
KEPT: Final = 60
_LEVEL: Final = 1  # the fastest: most of the gain, for a fraction of a millisecond


class Moments:
    """Mutable: snapshots as JSON, by their instants (UTC seconds)."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, bytes]] = deque(maxlen=KEPT)

    def add(self, at: float, snapshot: bytes) -> None:
        while self._kept and self._kept[-1][0] >= at:
            self._kept.pop()
        self._kept.append((at, zlib.compress(snapshot, _LEVEL)))

    @property
    def instants(self) -> list[float]:
        return [at for at, _ in self._kept]

    @property
    def newest(self) -> float | None:
        return self._kept[-1][0] if self._kept else None

    def find(self, at: float) -> bytes | None:
        """Return the last snapshot at or before an instant; None if what was kept begins later."""
        place = bisect_right(self.instants, at)
        return zlib.decompress(self._kept[place - 1][1]) if place else None

    @property
    def size_bytes(self) -> int:
        return sum(len(snapshot) for _, snapshot in self._kept)

    def __repr__(self) -> str:
        return f"<Moments {len(self._kept)} of {KEPT}, {self.size_bytes} bytes>"

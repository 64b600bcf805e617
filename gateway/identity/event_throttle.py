"""The event coalescer writes one line for many events of a kind: the first at once, the rest as a count.

A scanner that tries a thousand keys a second must not fill the disk, nor bury other lines; an auditor needs to
know who, what, and how often. Kinds are bounded: past the bound, new kinds are counted together as "others".

Invariant: the counts of all lines of a kind, and of its held events, add up to the events seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final

WINDOW_S: Final = 10.0
MOST_KINDS: Final = 1024


class EventCoalescer:
    """Counts events by kind. Mutable: the counts of the current windows."""

    def __init__(self, window_s: float = WINDOW_S, most: int = MOST_KINDS) -> None:
        self._window_s = window_s
        self._most = most
        self._windows: dict[Hashable, tuple[float, int]] = {}  # kind → when its window ends, events since its line

    def seen(self, kind: Hashable, now: float) -> int:
        """Count an event; return how many events a line should be written for now, 0 for no line."""
        ends_at, held = self._windows.get(kind, (now, 0))
        if now < ends_at:
            self._windows[kind] = ends_at, held + 1
            return 0
        if kind not in self._windows and len(self._windows) >= self._most:
            return self.seen("others", now) if kind != "others" else 1
        self._windows[kind] = now + self._window_s, 0
        return held + 1

    def due(self, now: float) -> Iterator[tuple[Hashable, int]]:
        """Yield each kind whose window is over with its held count, and forget it."""
        over = [kind for kind, (ends_at, _) in self._windows.items() if now >= ends_at]
        for kind in over:
            _, held = self._windows.pop(kind)
            if held:
                yield kind, held

    def __repr__(self) -> str:
        return f"<EventCoalescer {len(self._windows)} kinds, {sum(held for _, held in self._windows.values())} held>"

"""The event coalescer writes one line for many events of a kind: the first at once, the rest as a count.

A scanner that tries a thousand keys a second must not fill the disk, nor bury other lines; an auditor needs to
know who, what, and how often.

Kinds are bounded, because a kind can hold what the caller invents, as the id of a key that does not exist. Past the
bound, new kinds are counted together as "others". These have a place of their own beyond the bound: without it there
would be no room for their count in a flood, and each of their events would be a line. The first of them is written
under its own kind; what is held of them leaves only by `due`, since `seen` can count it under no kind but the one that
its caller has at hand.

Invariants: the counts of all lines, and of the events that are held, add up to the events seen. No line counts events
of a kind that it does not name. In a window's time at most 2 × (the bound + 1) lines are written: each place says one
when its window begins and one when it is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final

WINDOW_S: Final = 10.0
MOST_KINDS: Final = 1024
OTHERS: Final = "others"


class EventCoalescer:
    """Counts events by kind. Mutable: the counts of the current windows."""

    def __init__(self, window_s: float = WINDOW_S, most: int = MOST_KINDS) -> None:
        self._window_s = window_s
        self._most = most
        self._windows: dict[Hashable, tuple[float, int]] = {}  # kind → when its window ends, events since its line

    def seen(self, kind: Hashable, now: float) -> int:
        """Count an event; return how many events of this kind a line should be written for now, 0 for no line."""
        place = self._place_of(kind)
        ends_at, held = self._windows.get(place, (now, 0))
        if now < ends_at or (place == OTHERS and held):  # what is held of the others must not be written as this kind's
            self._windows[place] = ends_at, held + 1
            return 0
        self._windows[place] = now + self._window_s, 0
        return held + 1

    def _place_of(self, kind: Hashable) -> Hashable:
        named = len(self._windows) - (OTHERS in self._windows)
        return kind if kind in self._windows or named < self._most else OTHERS

    def due(self, now: float) -> Iterator[tuple[Hashable, int]]:
        """Yield each kind whose window is over with its held count, and forget it. "others" is a kind here."""
        over = [kind for kind, (ends_at, _) in self._windows.items() if now >= ends_at]
        for kind in over:
            _, held = self._windows.pop(kind)
            if held:
                yield kind, held

    def __repr__(self) -> str:
        return f"<EventCoalescer {len(self._windows)} kinds, {sum(held for _, held in self._windows.values())} held>"

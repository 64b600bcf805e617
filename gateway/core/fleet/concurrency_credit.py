"""A concurrency credit bounds how much a target is believed to do at a time, by what it has been seen to do.

A target says how many generations it takes at a time, and a site how many places it has. Both lift the limit of what
this gateway lets in (`gateway/core/admission/concurrency.py`), for all callers. So a word alone is not enough: one
device that claims 65,536 slots would undo the limit.

    believed = min(claimed, max(FIRST, 2 × seen))
    seen     the most that were under way there at once when one of them was answered well

The first is enough for a device and for most servers, and doubles each time that the target shows that it does so much:
a server with 256 slots is believed in three steps, each as long as its shortest answers. What only begins and never
ends shows nothing. A claim that falls is believed at once.

How it can be wrong: answers at once are counted and not their speed. A target that takes much and is slow is left to
placement, which sees that it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

FIRST: Final = 32


class ConcurrencyCredit:
    """Mutable: one target's. `on_change` is called with what is believed after each change of that."""

    __slots__ = ("_on_change", "_seen", "_under_way", "believed", "claimed")

    def __init__(self, on_change: Callable[[int], None] = lambda _believed: None) -> None:
        self.claimed = 0
        self.believed = 0
        self._seen = 0
        self._under_way = 0  # generations of which the first token is here
        self._on_change = on_change

    def claim(self, claimed: int) -> None:
        """The target says that it takes so many at a time."""
        self.claimed = claimed
        self._believe()

    def begun(self) -> None:
        """A generation's first token came."""
        self._under_way += 1

    def left(self, *, well: bool) -> None:
        """A generation that had begun has ended, `well` with its answer."""
        if well:
            self.answered(self._under_way)
        self._under_way -= 1

    def answered(self, at_once: int) -> None:
        """One was answered well while so many were under way, itself among them."""
        if at_once > self._seen:
            self._seen = at_once
            self._believe()

    def bounded(self, claimed: float) -> float:
        """What is believed of another claim of the same target."""
        return min(claimed, float(max(FIRST, 2 * self._seen)))

    def _believe(self) -> None:
        believed = int(self.bounded(self.claimed))
        if believed != self.believed:
            self.believed = believed
            self._on_change(believed)

    def __repr__(self) -> str:
        return f"<ConcurrencyCredit {self.believed} of {self.claimed}, {self._seen} seen>"

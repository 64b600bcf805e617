"""The devices whose view may have changed: by a message, or because their silence crossed a limit.

A gateway of ten thousand devices cannot look at all of them whenever one sends a message. Two things change a view, and
both are kept here by name: a message (`mark`), and the clock alone, at an instant that each device knows of itself
(`sooner`). These instants are mostly moved later, by every heartbeat; so the heap holds lower bounds, and an entry that
comes to the top is checked against its device before it is believed, and goes back where it was too early.

Invariants: no change is missed, since an entry is never later than the true instant; marking and moving cost O(log n)
however large the fleet is, and the heap stays within a few times as many entries as there are devices.

Source: lazy deletion in priority queues, as event schedulers and timer wheels do it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

from gateway.fleet_sync.freshness import JUST_AFTER_S

_SPARE: Final = 64
_EXACT_S: Final = 2 * JUST_AFTER_S  # between a limit and the instant just after it there is nothing left to foresee


class PendingChanges:
    """Mutable; names only, it knows no device."""

    __slots__ = ("_due_at", "_heap", "_names")

    def __init__(self) -> None:
        self._names: dict[str, None] = {}  # in the order in which they changed
        self._due_at: dict[str, float] = {}  # no later than the clock alone changes that device's view
        self._heap: list[tuple[float, str]] = []

    def mark(self, name: str) -> None:
        self._names[name] = None

    def take(self, most: int) -> list[str]:
        """The names that have changed longest ago, at most so many; they are marked no more."""
        taken = [name for name, _ in zip(self._names, range(most), strict=False)]
        for name in taken:
            del self._names[name]
        return taken

    def sooner(self, name: str, at: float | None) -> None:
        """The clock alone changes this device's view at `at`, None: never. One later than known waits its turn."""
        if at is None or at >= self._due_at.get(name, at + 1.0):
            return
        self._due_at[name] = at
        heappush(self._heap, (at, name))
        if len(self._heap) > 2 * len(self._due_at) + _SPARE:
            self._heap = [(due_at, held) for held, due_at in self._due_at.items()]
            heapify(self._heap)

    def is_timed(self, name: str) -> bool:
        """Whether the clock is known to change this device's view some time."""
        return name in self._due_at

    @property
    def instants(self) -> int:
        """How many instants are held, those that a device has since moved or forgotten among them."""
        return len(self._heap)

    def forget(self, name: str) -> None:
        """There is no such device any more, which is a change as well."""
        self._due_at.pop(name, None)
        self.mark(name)

    def next_at(self, now: float, true_next: Callable[[str, float], float | None]) -> float | None:
        """The next instant after `now` at which the clock changes a device's view; marks those it has changed by now.

        Args:
            true_next: of a device, the first such instant after another; None when there is none.
        """
        while self._heap:
            due_at, name = self._heap[0]
            if self._due_at.get(name) != due_at:  # forgotten, or moved
                heappop(self._heap)
                continue
            at = true_next(name, due_at - _EXACT_S)
            is_true = at is not None and at <= due_at + _EXACT_S
            if is_true and due_at > now:
                return due_at
            heappop(self._heap)
            del self._due_at[name]
            if is_true:
                self.mark(name)
                at = true_next(name, now)
            self.sooner(name, at)
        return None

    def __repr__(self) -> str:
        return f"<PendingChanges {len(self._names)} to look at, {len(self._due_at)} by the clock>"

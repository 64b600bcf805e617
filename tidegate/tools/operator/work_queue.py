"""Which resources are to be looked at, and when (pure): each at most once, and after a failure ever later.

A resource that is reported again while it waits is looked at once. One that fails is tried again after a growing, drawn
wait; a change of it is looked at at once all the same, because the change may be what mends it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf
from typing import Generic, TypeVar

from tidegate.runtime.backoff import Backoff

KeyT = TypeVar("KeyT", bound=Hashable)


class WorkQueue(Generic[KeyT]):
    """Mutable; instants are those of the caller's clock.

    Args:
        draw: uniform in [0, 1).
        cap_s: the longest wait after failures.
    """

    def __init__(self, draw: Callable[[], float], *, base_s: float = 0.2, cap_s: float = 30.0) -> None:
        self._draw = draw
        self._base_s = base_s
        self._cap_s = cap_s
        self._due: dict[KeyT, float] = {}
        self._backoffs: dict[KeyT, Backoff] = {}

    def add(self, key: KeyT, at: float) -> None:
        """Look at it then, or earlier if it was to be looked at earlier."""
        self._due[key] = min(at, self._due.get(key, inf))

    def take(self, now: float) -> KeyT | None:
        """Return what is due longest, and forget it."""
        key = min(self._due, key=self._due.__getitem__, default=None)
        if key is None or self._due[key] > now:
            return None
        del self._due[key]
        return key

    def next_at(self) -> float:
        """When something is due; infinity for nothing."""
        return min(self._due.values(), default=inf)

    def failed(self, key: KeyT, now: float) -> float:
        """Return the wait in seconds until it is tried again."""
        backoff = self._backoffs.setdefault(key, Backoff(self._draw, self._base_s, self._cap_s))
        wait_s = max(self._base_s / 2, backoff.next_delay_s())
        self.add(key, now + wait_s)
        return wait_s

    def succeeded(self, key: KeyT) -> None:
        self._backoffs.pop(key, None)

    def forget(self, key: KeyT) -> None:
        self._due.pop(key, None)
        self._backoffs.pop(key, None)

    def __repr__(self) -> str:
        return f"<WorkQueue {len(self._due)} waiting, {len(self._backoffs)} failing>"

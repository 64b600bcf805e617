"""A queue of events on virtual time, in which an hour passes as fast as its events can be run.

Events run in the order of their instants, and those of one instant in the order in which they were scheduled; so a
run is the same every time, whatever the memory addresses or the hash seeds are. A cancelled event stays in the heap
until its turn and does nothing then: timers are cancelled far more often than they fire, and taking one out of the
middle costs more than skipping it.

Invariants: time never goes back; an event scheduled for the past runs now; each event runs at most once.
Prior art: simpy, and the loop of asyncio, without their processes and futures.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

# [instant, number, what, arguments]; `what` None once it is cancelled or has run. A list, because it is cancelled in
# place, and because lists compare in C where a class with `__lt__` would not.
Event = list[Any]


class EventQueue:
    """Mutable: `schedule`, `cancel`, and `run` until nothing is left."""

    __slots__ = ("_heap", "_number", "executed", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.executed = 0
        self._heap: list[Event] = []
        self._number = 0

    def schedule(self, at: float, what: Callable[..., None], *arguments: Any) -> Event:
        """Have `what(*arguments)` called at the instant `at`; returns what `cancel` takes."""
        self._number += 1
        event: Event = [at if at > self.now else self.now, self._number, what, arguments]
        heappush(self._heap, event)
        return event

    @staticmethod
    def cancel(event: Event) -> None:
        """Have it not happen. Nothing if it has happened already."""
        event[2] = None

    def run(self, until: float = inf) -> None:
        """Run events up to and including the instant `until`, those that they schedule as well."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            event = heappop(heap)
            what = event[2]
            if what is None:
                continue
            self.now = event[0]
            self.executed += 1
            event[2] = None
            what(*event[3])
        if until != inf:
            self.now = max(self.now, until)

    def __len__(self) -> int:
        return len(self._heap)

    def __repr__(self) -> str:
        return f"<EventQueue at {self.now:.3f} s, {len(self)} scheduled, {self.executed} executed>"


class Alarm:
    """One wake-up at a time for one owner: set to another instant it moves, set to None it is off."""

    __slots__ = ("_at", "_event", "_events", "_ring")

    def __init__(self, events: EventQueue, ring: Callable[[int], None]) -> None:
        """Args: ring: called with the epoch that the alarm was set in; an owner that restarted ignores an old one."""
        self._events = events
        self._ring = ring
        self._event: Event | None = None
        self._at = 0.0

    def set(self, at: float | None, epoch: int) -> None:
        if self._event is not None:
            if at == self._at:
                return
            self._events.cancel(self._event)
            self._event = None
        if at is not None:
            self._event, self._at = self._events.schedule(at, self._rang, epoch), at

    def _rang(self, epoch: int) -> None:
        self._event = None
        self._ring(epoch)

    def __repr__(self) -> str:
        return f"<Alarm {'off' if self._event is None else f'at {self._at:.3f}'}>"

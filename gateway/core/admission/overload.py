"""Whether there is more work than the fleet can do: a state with a memory, entered by evidence, left after calm.

Single late answers mean nothing, and what is decided by this state (no hedges, no escalations, shedding) changes the
load itself, so a threshold alone would flap. Evidence is gathered in windows of `WINDOW_S`, each hot or not:

    queueing   every one of at least `MIN_DECISIONS` placements had a queue before it that eats more than `STRAIN` of
               its slack: the *least* strain of the window counts, since a good queue is empty now and then (CoDel)
    missing    over `MISS_RATIO` of recent attempts were lost to queues: refused there, or late by less than they queued
    shedding   requests are still being refused in order to keep queues short: without it the queues would be back

The state is on after `ENTER_S` of hot windows in a row and off after `LEAVE_S` without one. A window in which nothing
came is not hot. Time on links is no evidence: a jittering link is not an overloaded fleet, and hedges are its cure.

Invariants: after turning on it stays on for at least `LEAVE_S`; turning on takes at least `ENTER_S` of evidence. O(1).
It can be wrong where only one model's targets are swamped: then the others' empty queues hide it until attempts miss.
Source: Nichols and Jacobson, "Controlling Queue Delay", ACM Queue 2012 (the least delay of a window is what tells a
standing queue); docs/design/routing.md, "Overload state" (the draft had a queue delay over 20 ms for 100 ms, or 5 %
missed). Our simulations turned its bounds into a whole slack and 10 %: lower ones take for overload what the queues of
a fleet at 0.6 to 0.9 of its load absorb.
"""

from __future__ import annotations

from math import inf
from typing import Final

WINDOW_S: Final = 0.05
ENTER_S: Final = 0.1
LEAVE_S: Final = 1.0
STRAIN: Final = 1.0
MIN_DECISIONS: Final = 4
MISS_RATIO: Final = 0.1
_MIN_ATTEMPTS: Final = 20.0  # a share of fewer says nothing
_KEEP: Final = 0.9  # of the counts of attempts, per window: a memory of half a second


class Overload:
    """Mutable: tell it what happens (`placed`, `attempt_ended`), and `observe` before reading `on`."""

    __slots__ = ("_cool_since", "_decisions", "_ended", "_hot_since", "_least_strain", "_opened_at",
                 "changes", "lost", "on", "reason", "since")  # fmt: skip

    def __init__(self) -> None:
        self.on = False
        self.reason = "nothing has happened yet"
        self.since = 0.0
        self.changes = 0
        self._opened_at: float | None = None  # of the window under way
        self._decisions = 0
        self._least_strain = inf
        self._ended = 0.0
        self.lost = 0.0  # attempts lost to queues, decayed
        self._hot_since: float | None = None
        self._cool_since = 0.0

    def placed(self, strain: float) -> None:
        """A request was placed where a queue eats this share of the time that it has to spare."""
        self._decisions += 1
        self._least_strain = min(self._least_strain, strain)

    def attempt_ended(self, *, lost: bool) -> None:
        """An attempt is over; `lost`: to a queue."""
        self._ended += 1.0
        self.lost += lost

    def observe(self, now: float, *, shedding: bool = False) -> bool:
        """Judge the windows that have passed; returns whether `on` changed. `shedding`: requests are being refused."""
        if self._opened_at is None:
            self._opened_at = self._cool_since = now
            return False
        if now < self._opened_at + WINDOW_S:
            return False
        why = self._heat(shedding)
        closed_at = self._opened_at + WINDOW_S
        changed = self._note_hot(why, closed_at, now) if why else self._note_cool(closed_at, now)
        self._ended, self.lost = _KEEP * self._ended, _KEEP * self.lost
        self._opened_at, self._decisions, self._least_strain = now, 0, inf
        return changed

    def _heat(self, shedding: bool) -> str:
        """Why the window was hot; "" when it was not."""
        if self._decisions >= MIN_DECISIONS and self._least_strain > STRAIN:
            return f"every target's queue takes {min(self._least_strain, 9.99):.0%} of the slack or more"
        if self._ended >= _MIN_ATTEMPTS and self.lost > MISS_RATIO * self._ended:
            return f"{self.lost / self._ended:.0%} of attempts are lost to queues"
        return "requests are still being shed" if shedding and self.on else ""

    def _note_hot(self, why: str, closed_at: float, now: float) -> bool:
        if self._hot_since is None:
            self._hot_since = closed_at - WINDOW_S
        self._cool_since = closed_at
        long_enough = closed_at - self._hot_since >= ENTER_S - 1e-9
        if now - closed_at > WINDOW_S:
            self._hot_since = None  # nothing came for a while after it: the next hot window is another beginning
        if self.on or not long_enough:
            return False
        return self._turn(True, why, now)

    def _note_cool(self, closed_at: float, now: float) -> bool:
        self._hot_since = None
        if not self.on or now - self._cool_since < LEAVE_S:
            return False
        return self._turn(False, f"calm for {now - self._cool_since:.1f} s", now)

    def _turn(self, on: bool, reason: str, now: float) -> bool:
        self.on, self.reason, self.since = on, reason, now
        self._cool_since = now  # a state just entered is kept for LEAVE_S at the least
        self.changes += 1
        return True

    def __repr__(self) -> str:
        return f"<Overload {'on' if self.on else 'off'} since {self.since:.2f}: {self.reason}>"

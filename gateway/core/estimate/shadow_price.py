"""The shadow price is what a second of a target's time is worth to requests that are still to come.

Harm (`queue_externality.py`) is what a request takes from requests that wait already. It also takes time from requests
that will come while it computes, and where a target is nearly full there is no other time for them. A rule that ignores
them fills the slow, cheap target with long work whenever it is idle for a moment, and the next tight request finds it
busy. In the linear program that assigns work to machines this is the dual price of a machine's capacity: nothing while
there is room, and then as much as the best use of a second there brings. Without solving it, queueing theory has its
shape: the delay that one more second of work causes to later arrivals grows as ρ / (1 − ρ), so

    price per second = ρ / max(1 − ρ, FULL)        in ordinary answers in time; ρ the work sent there lately

`ρ` is an exponentially weighted rate over MEMORY_S, about as long as a burst must last to matter to deadlines of
tenths of a second. With FULL of a tenth a full target's second costs ten answers: work that brings less for it (a long
text on a slow device) goes elsewhere, which is as it should be even if elsewhere is not sure to make it.

An engine that generates has slots instead, each of which an answer holds for its whole length. Whoever takes one of
the last leaves none to a request that comes meanwhile, and such requests come at once where a link goes bad: all that
could go to two places can go to one. Cheap devices that are filled to the last slot are of no help then. With n of c
slots taken one more of them costs

    price of a slot = SLOT · (n / c)⁴            in ordinary answers in time; nothing for an engine that has only one

Only this gateway's own work is counted, and of slots what a target's last report has beyond it. Invariants: prices are
from 0 to MOST / FULL, and to SLOT; they fall while nothing is sent.
Source: docs/design/routing.md, "Shadow price of capacity"; "Queue externality" there has the harm to requests in
the queue; simulated (office_wifi, four seeds, at 0.9 and 1.2 of the knee) this price is worth
another 2.1 and 2.5 points. SLOT and the fourth power were chosen in simulation, too ("Shadow price of a slot" there).
"""

from __future__ import annotations

from math import exp
from typing import Final

MEMORY_S: Final = 0.5
_FULL: Final = 0.1
_MOST: Final = 10.0  # times a target's capacity: more says nothing new
_SLOT: Final = 0.5  # answers: the last slot of an engine


class ShadowPrice:
    """Mutable: `sent` with each launch; `per_second` is the price of a second now."""

    __slots__ = ("_at", "_rate")

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0

    def sent(self, work_s: float, now: float) -> None:
        """So many seconds of work were sent there."""
        self._rate = min(_MOST, self.rate(now) + work_s / MEMORY_S)
        self._at = now

    def rate(self, now: float) -> float:
        """Seconds of work a second, lately."""
        return self._rate * exp((self._at - now) / MEMORY_S)

    def per_second(self, now: float) -> float:
        """What a second there takes from requests still to come, in ordinary answers in time."""
        rate = self.rate(now) if self._rate else 0.0
        room = 1.0 - rate  # ρ / max(1 − ρ, FULL)
        return rate / (room if room > _FULL else _FULL)

    def __repr__(self) -> str:
        return f"<ShadowPrice {self._rate:.2f} at {self._at:.3f}>"


def slot_price(taken: float, slots: int) -> float:
    """What one slot of an engine takes from generations still to come, in ordinary answers in time.

    Args:
        taken: sequences that wait or run there.
        slots: 0: without a limit that is known, which has no price. 1: there is no last one to be kept.
    """
    share = min(1.0, taken / slots) if slots > 1 else 0.0
    return _SLOT * share**4

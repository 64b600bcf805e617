"""The edge queue orders requests by deadline, is bounded, and refuses at once what it cannot do in time.

A small device that takes more than it can do makes every answer late. So the decision is made once, on
arrival, and an immediate refusal lets the gateway place the request elsewhere while there is still time for it:

- no room: `Overloaded`, with the predicted time until the present queue has drained;
- *provably* late: even if everything ahead of it took only `OPTIMISM` of its predicted time, it would not be done by
  its deadline: `DeadlineExceeded` at once. Merely probable lateness is not refused here; the gateway decides about
  chances.

Order is by deadline and priority, as everywhere (`tidegate/priority.py`). Every request has a deadline, so none waits
for ever. A waiting request is dropped as soon as it could not meet its deadline even if it started now;
`next_wake` is the next such instant, so its caller is answered by a timer and not when a slot happens to become free.

With shares (`tidegate/models/fair_share.py`) a group of models that is owed its share of the device's seconds goes
first, and one far ahead of it last; predictions on arrival go by deadlines alone. Each ticket is charged its prediction
as it is taken.

Computations cannot be interrupted, so a request that was taken stays in its slot until `finish`. At most `slots` lanes
compute at once, each one call after another (a lane is a model's worker process). What is short is handed over ahead of
its turn: a worker that finds the next call in its memory is not woken for it, which takes longer than a small model
does. So beside the one that computes, its lane gets those that are next in order, `ahead_s` of computation by their
predictions, and no more: they can neither be overtaken nor taken back. Nobody is put behind a call that has longer to
go than that, or is as long overdue: it would wait there, out of the queue's sight, for nothing gained.

With one slot, as most devices have, requests follow each other in order, and a prediction is a sum. With more slots it
simulates which starts next.

Invariants: none is let in beyond `max_size` waiting; every admitted request leaves exactly once, by `take`, `expire` or
`remove`; nothing is taken once it could not make its deadline any more. O(waiting) per operation, which the bound
keeps to tens of microseconds.

It can be wrong when predictions are: `cost_s` is the caller's, corrected by what calls really took.

Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973
(EDF); docs/design/routing.md, "Provable lateness".
"""

from __future__ import annotations

from bisect import bisect_right, insort_right
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Final

import msgspec

from tidegate.models.fair_share import FairShare
from tidegate.outcome import DeadlineExceeded, Overloaded
from tidegate.priority import order_key
from tidegate.types import Accepted

# docs/design/routing.md, "Provable lateness": faster than its prediction by more than this, a call never is
OPTIMISM = 0.6
# Waking a worker and being woken by it takes some 0.3 ms, of which this leaves little; and nobody waits much longer.
HAND_OVER_AHEAD_S = 0.002
MAX_AHEAD = 15  # calls beside the one that computes: `tidegate/workers/process.py` keeps no more with a worker
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.05, 30.0


class QueueTicket(msgspec.Struct, frozen=True):
    """One request in the queue: `lane` names the worker that will compute it, `cost_s` is its predicted time.

    `compute_s` is the part of it in which the worker itself is at it, and not on the way there and back.
    """

    id: int
    lane: str
    deadline: float
    cost_s: float
    priority: int = 0
    group: str = ""  # the model or modality whose share of the device it uses
    compute_s: float | None = None  # None: all of it

    @property
    def key(self) -> float:
        return order_key(self.deadline, self.priority)

    @property
    def latest_start(self) -> float:
        """From this instant on the request is provably late."""
        return self.deadline - OPTIMISM * self.cost_s


class _WaitingTicket(msgspec.Struct, frozen=True):
    """A ticket with what every look at the queue asks of it."""

    key: float
    latest_start: float
    cost_s: float
    ticket: QueueTicket


_key: Final = attrgetter("key")


class EdgeQueue:
    """Mutable; `admit` takes in, `take`, `expire` and `remove` give out, `finish` frees a slot.

    Args:
        ahead_s: predicted seconds of computation that a lane may have beside the call that it computes.
    """

    def __init__(self, *, max_size: int, slots: int = 1, shares: FairShare | None = None, ahead_s: float = 0.0) -> None:
        self._max_size = max_size
        self._slots = slots
        self._ahead_s = ahead_s
        self._shares = shares  # None: deadlines alone decide
        self._waiting: list[_WaitingTicket] = []  # by key; equal keys in order of arrival
        self._running: dict[int, QueueTicket] = {}  # in the order in which they were taken
        self._began_at: dict[str, float] = {}  # by lane: when the first of its calls began to be computed

    def resize(self, max_size: int) -> None:
        """From now on so many may wait; what waits already stays."""
        self._max_size = max_size

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def is_waiting(self, ticket_id: int) -> bool:
        return any(one.ticket.id == ticket_id for one in self._waiting)

    def admit(self, ticket: QueueTicket, now: float) -> Accepted:
        """Queue `ticket`; the number of requests before it, and the predicted time until its computation ends.

        Raises:
            Overloaded: no room; `retry_after_s` is the predicted time until the queue has drained.
            DeadlineExceeded: provably late; it was not queued.
        """
        if len(self._waiting) >= self._max_size:
            message = f"the queue is full: {self._max_size} requests wait"
            raise Overloaded(message, retry_after_s=self._retry_after_s(now))
        if self._finish_in_s(ticket, now, OPTIMISM) >= ticket.deadline - now:
            raise DeadlineExceeded(self._too_late(ticket, now))
        accepted = Accepted(self.queue_ahead(ticket.deadline, ticket.priority), self._finish_in_s(ticket, now, 1.0))
        insort_right(self._waiting, _WaitingTicket(ticket.key, ticket.latest_start, ticket.cost_s, ticket), key=_key)
        return accepted

    def take(self, now: float) -> QueueTicket | None:
        """The next ticket to compute, or to hand over ahead, taken until `finish`; None when there is none."""
        busy = {running.lane for running in self._running.values()}
        for lane in busy - self._began_at.keys():  # the one before has just ended
            self._began_at[lane] = now
        if not self._waiting:
            return None
        chosen = None
        if len(busy) < self._slots:
            startable = (one for one in self._waiting if one.ticket.lane not in busy and now < one.latest_start)
            chosen = next(startable, None) if self._shares is None else _of_first_group(list(startable), self._shares)
        if chosen is None and self._ahead_s > 0.0 and busy:
            chosen = self._next_ahead(now)
        if chosen is None:
            return None
        self._waiting.remove(chosen)
        self._running[chosen.ticket.id] = chosen.ticket
        self._began_at.setdefault(chosen.ticket.lane, now)
        return chosen.ticket

    def _next_ahead(self, now: float) -> _WaitingTicket | None:
        """The first in order, if its lane has room ahead. With shares, whose turn is next is not known yet."""
        first = self._waiting[0]
        lane = [running for running in self._running.values() if running.lane == first.ticket.lane]
        if not lane or self._shares is not None or len(lane) > MAX_AHEAD or now >= first.latest_start:
            return None
        computed_s = now - self._began_at[first.ticket.lane]
        if not _computes_s(lane[0]) - self._ahead_s <= computed_s <= lane[0].cost_s + self._ahead_s:
            return None
        ahead_s = sum([_computes_s(one) for one in (*lane[1:], first.ticket)])
        return first if ahead_s <= self._ahead_s else None

    def finish(self, ticket_id: int) -> None:
        """Free the slot of a taken ticket, whatever became of it. What its lane has beside it begins now (`take`)."""
        self._began_at.pop(self._running.pop(ticket_id).lane, None)

    def expire(self, now: float) -> list[QueueTicket]:
        """Take out the waiting tickets that can no longer meet their deadlines."""
        expired = [one.ticket for one in self._waiting if now >= one.latest_start]
        if expired:
            self._waiting = [one for one in self._waiting if now < one.latest_start]
        return expired

    def remove(self, ticket_id: int) -> bool:
        """Take out a waiting ticket whose caller has left; False when it does not wait (any more)."""
        for at, one in enumerate(self._waiting):
            if one.ticket.id == ticket_id:
                del self._waiting[at]
                return True
        return False

    def close(self, lane: str) -> list[QueueTicket]:
        """Take out all tickets that wait for a lane whose worker is gone."""
        closed = [one.ticket for one in self._waiting if one.ticket.lane == lane]
        self._waiting = [one for one in self._waiting if one.ticket.lane != lane]
        return closed

    def next_wake(self) -> float | None:
        """The instant at which `expire` next returns a ticket; None when the queue is empty."""
        return min([one.latest_start for one in self._waiting], default=None)

    def queue_ahead(self, deadline: float, priority: int = 0) -> int:
        """How many waiting or computing requests would go before a request that arrived now."""
        return len(self._running) + bisect_right(self._waiting, order_key(deadline, priority), key=_key)

    def queue_delay_s(self, now: float) -> float:
        """Predicted wait of a request with the latest of deadlines, if it arrived now for an idle worker."""
        return self._finish_in_s(QueueTicket(-1, "", float("inf"), 0.0), now, 1.0)

    def finish_in_s(self, ticket: QueueTicket, now: float) -> float:
        """Predicted time until the ticket would be done if it was admitted now."""
        return self._finish_in_s(ticket, now, 1.0)

    def _retry_after_s(self, now: float) -> float:
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, self.queue_delay_s(now)))

    def _too_late(self, ticket: QueueTicket, now: float) -> str:
        ahead = self.queue_ahead(ticket.deadline, ticket.priority)
        finish_ms = self._finish_in_s(ticket, now, OPTIMISM) * 1e3
        left_ms = (ticket.deadline - now) * 1e3
        left = f"{left_ms:.0f} ms are left" if left_ms >= 0.5 else "no time is left"
        return (
            f"cannot be done in time: {ahead} requests go first and the earliest finish is in {finish_ms:.0f} ms, "
            f"but {left}"
        )

    def _finish_in_s(self, ticket: QueueTicket, now: float, factor: float) -> float:
        """Predicted time until `ticket` would be done if queued now, with every cost `factor` times its prediction."""
        if self._slots > 1:
            return self._simulated_finish_in_s(ticket, now, factor)
        at, key = max(self._lane_ends(now, factor).values(), default=now), ticket.key
        for one in self._waiting:
            if one.key > key:
                break
            at += one.cost_s * factor
        return at + ticket.cost_s * factor - now

    def _lane_ends(self, now: float, factor: float) -> dict[str, float]:
        """When each lane that computes should be through with what it has, every cost `factor` times its prediction."""
        ends: dict[str, float] = {}
        for running in self._running.values():
            lane = running.lane
            ends[lane] = ends.get(lane, self._began_at.get(lane, now)) + running.cost_s * factor
        return {lane: max(now, end) for lane, end in ends.items()}

    def _simulated_finish_in_s(self, ticket: QueueTicket, now: float, factor: float) -> float:
        """The same where several compute: whenever a slot is free, the first in order whose lane is idle starts."""
        busy = [(end, lane) for lane, end in self._lane_ends(now, factor).items()]
        heapify(busy)
        waiting = [one.ticket for one in self._waiting]
        waiting.insert(bisect_right(self._waiting, ticket.key, key=_key), ticket)
        at = now
        while True:
            if len(busy) >= self._slots or (startable := _first_idle(waiting, busy)) is None:
                at = heappop(busy)[0]
                continue
            one = waiting.pop(startable)
            finish = at + one.cost_s * factor
            if one is ticket:
                return finish - now
            heappush(busy, (finish, one.lane))

    def __repr__(self) -> str:
        return f"<EdgeQueue {self.queued}/{self._max_size} waiting, {self.in_flight}/{self._slots} computing>"


def _computes_s(ticket: QueueTicket) -> float:
    return ticket.cost_s if ticket.compute_s is None else ticket.compute_s


def _of_first_group(startable: list[_WaitingTicket], shares: FairShare) -> _WaitingTicket | None:
    """The first ticket, in order, of the group whose turn it is; it is charged."""
    if not startable:
        return None
    first: dict[str, _WaitingTicket] = {}
    for one in startable:
        first.setdefault(one.ticket.group, one)
    chosen = first[shares.order({group: one.key for group, one in first.items()})[0]]
    shares.charge(chosen.ticket.group, chosen.cost_s)
    return chosen


def _first_idle(waiting: list[QueueTicket], busy: list[tuple[float, str]]) -> int | None:
    """The place of the first of `waiting` whose lane is not in `busy`."""
    if not busy:
        return 0
    lanes = {lane for _, lane in busy}
    return next((at for at, ticket in enumerate(waiting) if ticket.lane not in lanes), None)

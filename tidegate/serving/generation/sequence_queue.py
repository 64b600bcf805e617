"""The sequence queue decides which generation begins next, and refuses at once what cannot be done here.

A generation holds a slot of its engine, and memory for the attention cache of all its tokens, for seconds. So a model
begins no more of them than there are slots and memory for, on each place where it is loaded (a worker), and the others
wait in one queue:

    begun        ≤ `slots` of the place, and Σ cache_bytes of those begun there ≤ the place's limit
    order        the earliest latest start first, priorities as everywhere (`tidegate/priority.py`): that which still
                 keeps its first token's budget, and once that has passed, the one that still keeps the whole
    no room      the first in order waits for memory, and what is behind it waits as well: otherwise short prompts could
                 keep a long one out for ever

So an answer whose first token is late already goes behind those that can still make theirs, which cost the same slot
and are worth more. Otherwise a queue that has been long once answers all of them late for as long as it is full: each
gets its turn at about the time at which the one behind it becomes late. It is not starved either: as the last start
nears with which it would be whole in time, it comes to the front. Of `_ON_TIME_TURNS` + 1 starts at most one is given
so while others could still be on time: where far more is asked than can be begun, those that come last would else be
late too.

An answer may end at any token, its own and those ahead of it. So only what a request needs until its first token is
certain, or all of it where it wants every token: a request for which there is less time than `OPTIMISM` of that is
late for sure and is refused at once, and one that waits is refused at that instant, by a timer (`next_wake`). Merely
probable lateness is for gateways to weigh. What could never fit is refused with what it needs and what there is.

Invariants: never more than `max_size` waiting; slots and memory of a place are never exceeded; every admitted ticket
leaves exactly once, by `expire`, `leave` or `close`. O(waiting · log(waiting)) an operation.

It can be wrong about waits when predictions are: `expected_s` is the caller's.

Source: earliest deadline first: Liu and Layland, JACM 1973; admission by reserved caches as in Yu et al., "Orca",
OSDI 2022, section 4.2.
"""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from math import inf
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from tidegate.outcome import DeadlineExceeded, OutOfMemory, Overloaded
from tidegate.priority import order_key

OPTIMISM: Final = 0.6  # as in `edge_agent/core/edge_queue.py`: faster than predicted by more than this, a call never is
MIN_RETRY_AFTER_S: Final = 0.05
MAX_RETRY_AFTER_S: Final = 30.0
_ON_TIME_TURNS: Final = 3  # a late answer is worth 0.3 of one on time (`gateway/core/placement/utility.py`)
_key: Final = attrgetter("key")
_late_key: Final = attrgetter("late_key")


class SequenceTicket(msgspec.Struct, frozen=True):
    """One generation in the queue."""

    id: int
    deadline: float
    certain_s: float  # what it takes at least
    expected_s: float  # how long it should hold its slot
    cache_bytes: int  # of its prompt and of the longest answer that it may have
    priority: int = 0
    first_by: float = inf  # the instant by which its first token should be made; inf: without such a budget
    first_s: float = 0.0  # how long its slot should take for that

    @property
    def latest_start(self) -> float:
        """From this instant on it is late for sure."""
        return self.deadline - OPTIMISM * self.certain_s

    @property
    def keeps_first_until(self) -> float:
        """Begun before this instant, its first token should be in time; inf: it has no budget."""
        return self.first_by - self.first_s

    @property
    def key(self) -> float:
        """Its place in the order while it is on time."""
        return order_key(min(self.latest_start, self.keeps_first_until), self.priority)

    @property
    def late_key(self) -> float:
        """And once its first token is late: by the last start with which it should be whole in time."""
        return order_key(self.deadline - self.expected_s, self.priority)


class QueuePlace(NamedTuple):
    """Where an admitted generation stands: how many go first, and the seconds that it should wait."""

    ahead: int
    wait_s: float


@dataclass(slots=True)
class _Place:
    slots: int
    limit_bytes: float
    begun: dict[int, tuple[SequenceTicket, float]] = field(default_factory=dict)  # with when each began

    @property
    def reserved_bytes(self) -> int:
        return sum(ticket.cache_bytes for ticket, _ in self.begun.values())

    def takes(self, ticket: SequenceTicket) -> bool:
        return len(self.begun) < self.slots and self.reserved_bytes + ticket.cache_bytes <= self.limit_bytes


class SequenceQueue:
    """Mutable: `admit` takes in, `take` and `expire` give out, `leave` frees a place wherever it is.

    Args:
        max_size: how many may wait.
    """

    def __init__(self, *, max_size: int) -> None:
        self._max_size = max_size
        self._waiting: list[SequenceTicket] = []  # by key; equal keys in order of arrival
        self._on_time_turns = 0  # starts since one that was late for its first token
        self._places: dict[str, _Place] = {}
        self._where: dict[int, str] = {}  # of those begun

    def resize(self, max_size: int) -> None:
        """From now on so many may wait; what waits already stays."""
        self._max_size = max_size

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        return len(self._where)

    @property
    def slots(self) -> int:
        """Of all places together."""
        return sum(place.slots for place in self._places.values())

    @property
    def reserved_bytes(self) -> int:
        """Of the attention caches of all that have begun."""
        return sum(place.reserved_bytes for place in self._places.values())

    @property
    def has_places(self) -> bool:
        return bool(self._places)

    def open(self, place: str, *, slots: int, limit_bytes: float = inf) -> None:
        """The model is loaded at this place, for so many at a time and so many bytes of caches."""
        self._places[place] = _Place(slots, limit_bytes)

    def retire(self, place: str) -> int:
        """Begin nothing more at this place; returns how many are there still."""
        found = self._places.get(place)
        if found is None:
            return 0
        found.slots = 0
        return len(found.begun)

    def close(self, place: str) -> list[SequenceTicket]:
        """The place is gone, and what had begun there is over; returns those that wait, if no other place is left."""
        found = self._places.pop(place, None)
        for id in found.begun if found is not None else ():
            del self._where[id]
        if self._places:
            return []
        waiting, self._waiting = self._waiting, []
        return waiting

    def admit(self, ticket: SequenceTicket, now: float) -> QueuePlace:
        """Queue a ticket.

        Raises:
            OutOfMemory: no place has so much memory for caches, even when it is empty.
            Overloaded: as many wait as may; `retry_after_s` is the predicted wait.
            DeadlineExceeded: too little time is left for what it needs at least.
        """
        most = max([place.limit_bytes for place in self._places.values()], default=inf)
        if ticket.cache_bytes > most:
            raise OutOfMemory(
                f"the attention cache of this request may need {ticket.cache_bytes} bytes, and there are {most:.0f} "
                "(key 'generation_cache_bytes'): shorten the prompt or ask for fewer tokens ('max_tokens')"
            )
        if len(self._waiting) >= self._max_size:
            wait_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, self.wait_s(now)))
            raise Overloaded(f"the queue is full: {self._max_size} generations wait", retry_after_s=wait_s)
        if now >= ticket.latest_start:
            left_ms = max(0.0, ticket.deadline - now) * 1e3
            raise DeadlineExceeded(
                f"cannot be done in time: it takes {ticket.certain_s * 1e3:.0f} ms at least, but {left_ms:.0f} ms are "
                "left; give it a longer budget or a shorter prompt"
            )
        insort_right(self._waiting, ticket, key=_key)
        order = self._in_order(now)
        ahead = next(place for place, one in enumerate(order) if one.id == ticket.id)
        return QueuePlace(self.in_flight + ahead, self._wait_behind(order[:ahead], now))

    def take(self, now: float) -> tuple[SequenceTicket, str] | None:
        """The next to begin, and where: it holds its slot until `leave`. None: nothing can begin."""
        first = self._first(now)
        if first is None:
            return None
        free = [(len(one.begun) / one.slots, name) for name, one in self._places.items() if one.takes(first)]
        if not free:
            return None
        name = min(free)[1]  # the least busy
        self._waiting.remove(first)
        self._places[name].begun[first.id] = first, now
        self._where[first.id] = name
        self._on_time_turns = self._on_time_turns + 1 if now < first.keeps_first_until else 0
        return first, name

    def _first(self, now: float) -> SequenceTicket | None:
        """The one whose turn it is; None: nothing waits that could be in time."""
        live = [one for one in self._waiting if now < one.latest_start]
        on_time = next((one for one in live if now < one.keeps_first_until), None)
        late = min([one for one in live if now >= one.keeps_first_until], key=_late_key, default=None)
        if on_time is None or late is None:
            return on_time or late
        is_its_turn = late.late_key < on_time.key and self._on_time_turns >= _ON_TIME_TURNS
        return late if is_its_turn else on_time

    def _in_order(self, now: float) -> list[SequenceTicket]:
        """Those that wait as they should begin: those that can still be on time before the others."""
        late = [one for one in self._waiting if now >= one.keeps_first_until]
        if not late:
            return self._waiting
        return [one for one in self._waiting if now < one.keeps_first_until] + sorted(late, key=_late_key)

    def expire(self, now: float) -> list[SequenceTicket]:
        """Take out what waits and is late for sure."""
        late = [one for one in self._waiting if now >= one.latest_start]
        if late:
            self._waiting = [one for one in self._waiting if now < one.latest_start]
        return late

    def leave(self, ticket_id: int) -> None:
        """It has ended or its caller has left: its place in the queue or its slot is free. Unknown ones are ignored."""
        name = self._where.pop(ticket_id, None)
        if name is not None:
            del self._places[name].begun[ticket_id]
            return
        for at, one in enumerate(self._waiting):
            if one.id == ticket_id:
                del self._waiting[at]
                return

    def next_wake(self) -> float | None:
        """The instant at which `expire` next returns a ticket; None while none waits."""
        return min([one.latest_start for one in self._waiting], default=None)

    def wait_s(self, now: float) -> float:
        """The predicted wait of one that comes now and stands behind all that wait."""
        return self._wait_behind(self._waiting, now)

    def _wait_behind(self, ahead: Sequence[SequenceTicket], now: float) -> float:
        slots = self.slots
        if not slots:
            return 0.0
        ends = [
            max(now, began_at + ticket.expected_s)
            for place in self._places.values()
            if place.slots
            for ticket, began_at in place.begun.values()
        ]
        free_at = sorted(ends + [now] * max(0, slots - len(ends)))[:slots]
        heapify(free_at)
        for one in ahead:
            heapreplace(free_at, free_at[0] + one.expected_s)
        return free_at[0] - now

    def __repr__(self) -> str:
        return f"<SequenceQueue {self.queued}/{self._max_size} waiting, {self.in_flight}/{self.slots} begun>"

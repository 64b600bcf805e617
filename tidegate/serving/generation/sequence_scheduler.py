"""The sequence scheduler lets generations begin in the order of their queue, and owns the futures of those that wait.

`sequence_queue.py` decides; this file performs. A generation runs in its caller's task, so that a caller that leaves
takes it along: its slot and its memory are free at once, and the engine stops between two steps.

    admitted → waiting → begun at a place → ended        late, cancelled, or its place is gone: at any of these

A deadline ends a generation wherever it is; tokens that have gone out stay with who has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from math import inf
from typing import Generic, TypeVar

import msgspec

from tidegate import clock
from tidegate.outcome import DeadlineExceeded, Unreachable
from tidegate.serving.generation.sequence_queue import SequenceQueue, SequenceTicket
from tidegate.types import Accepted

T = TypeVar("T")


class SequenceNeed(msgspec.Struct, frozen=True):
    """What a generation needs, in seconds and bytes (`SequenceTicket`), and by when; `longest_s`: all of its tokens."""

    deadline: float
    certain_s: float
    expected_s: float
    longest_s: float
    cache_bytes: int
    priority: int = 0
    first_by: float = inf
    first_s: float = 0.0


class SequenceResult(msgspec.Struct, Generic[T], frozen=True):
    """What a generation gave, and the seconds that it waited and held its slot."""

    result: T
    queue_s: float
    held_s: float


class SequenceScheduler:
    """Mutable: `run` by callers, `open` and `close` by whoever keeps the workers."""

    def __init__(self, queue: SequenceQueue) -> None:
        self._queue = queue
        self._ids = count(1)
        self._turns: dict[int, asyncio.Future[str]] = {}
        self._inside = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._vacated = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at: float | None = None

    def resize(self, max_size: int) -> None:
        """As `SequenceQueue.resize`."""
        self._queue.resize(max_size)

    @property
    def queued(self) -> int:
        return self._queue.queued

    @property
    def in_flight(self) -> int:
        return self._queue.in_flight

    @property
    def slots(self) -> int:
        return self._queue.slots

    @property
    def reserved_bytes(self) -> int:
        return self._queue.reserved_bytes

    def queue_delay_s(self, now: float) -> float:
        """The predicted wait of a generation that comes now."""
        return self._queue.wait_s(now)

    def open(self, place: str, *, slots: int, limit_bytes: float = inf) -> None:
        """The model is loaded at a place of this name, which is never used again."""
        self._queue.open(place, slots=slots, limit_bytes=limit_bytes)
        self._pump()

    def close(self, place: str, reason: str) -> None:
        """A place is gone: what had begun there fails by itself, and what waits too if no place is left."""
        for ticket in self._queue.close(place):
            if (turn := self._turns.get(ticket.id)) is not None and not turn.done():
                turn.set_exception(Unreachable(reason))
        self._pump()

    async def retire(self, place: str) -> None:
        """Begin nothing more at a place, and wait until what has begun there is over."""
        while self._queue.retire(place):
            self._vacated.clear()
            await self._vacated.wait()

    async def drained(self) -> None:
        """Wait until nothing waits and nothing runs."""
        await self._idle.wait()

    async def run(
        self,
        need: SequenceNeed,
        work: Callable[[str], Awaitable[T]],
        *,
        unavailable: Callable[[], str],
        on_accepted: Callable[[Accepted], None] | None = None,
    ) -> SequenceResult[T]:
        """Await `work(place)` when its turn comes; `on_accepted` is called before that.

        Raises:
            Unreachable: there is no place, for the reason that `unavailable` says.
            OutOfMemory, Overloaded: at once.
            DeadlineExceeded: at once, or when its deadline came or could not be made any more.
            Exception: whatever `work` raised.
        """
        if not self._queue.has_places:
            raise Unreachable(unavailable())
        queued_at = clock.now()
        ticket = SequenceTicket(
            id=next(self._ids),
            deadline=need.deadline,
            certain_s=need.certain_s,
            expected_s=need.expected_s,
            cache_bytes=need.cache_bytes,
            priority=need.priority,
            first_by=need.first_by,
            first_s=need.first_s,
        )
        stands = self._queue.admit(ticket, queued_at)
        turn = self._turns[ticket.id] = asyncio.get_running_loop().create_future()
        self._inside += 1
        self._idle.clear()
        try:
            if on_accepted is not None:
                on_accepted(Accepted(stands.ahead, stands.wait_s + need.longest_s))
            self._pump()
            place = await turn
            began_at = clock.now()
            result = await self._until(need.deadline, work(place))
            return SequenceResult(result, began_at - queued_at, clock.now() - began_at)
        finally:
            if not turn.cancel() and not turn.cancelled():
                turn.exception()  # seen, though its caller was cancelled in the moment in which it was set
            self._leave(ticket.id)

    async def _until(self, deadline: float, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(deadline) as limit:
                return await work
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceeded("ran out of time while it was generated") from None
            raise

    def _pump(self) -> None:
        """Refuse what is late, let begin what may, and arm the timer for the next."""
        now = clock.now()
        for late in self._queue.expire(now):
            turn = self._turns[late.id]
            if not turn.done():
                turn.set_exception(DeadlineExceeded("could not be done in time: all slots are taken"))
        while (taken := self._queue.take(now)) is not None:
            ticket, place = taken
            if not (turn := self._turns[ticket.id]).done():  # else its caller has left, and is about to free it
                turn.set_result(place)
        self._arm()

    def _leave(self, ticket_id: int) -> None:
        del self._turns[ticket_id]
        self._queue.leave(ticket_id)
        self._vacated.set()
        self._inside -= 1
        if not self._inside:
            self._idle.set()
        self._pump()

    def _arm(self) -> None:
        wake_at = self._queue.next_wake()
        if wake_at == self._wake_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wake_at = wake_at
        self._timer = None if wake_at is None else asyncio.get_running_loop().call_at(wake_at, self._rung)

    def _rung(self) -> None:
        self._timer = self._wake_at = None
        self._pump()

    def __repr__(self) -> str:
        return f"<SequenceScheduler {self._queue!r}>"

"""The edge scheduler runs admitted requests in the order of the queue, and owns the futures that callers wait on.

`edge_agent/core/edge_queue.py` decides; this file performs. It holds one job per admitted request, starts the work that
the queue gives out, and arms one timer for the next request that will be too late. Whatever happens to a request, it
happens here, once:

- refused at once: `run` raises before anything was queued;
- cancelled while it waits: its place is free at once;
- cancelled while it computes: a computation cannot be stopped, so the slot stays taken, and the result is dropped;
- too late, waiting or computing: DeadlineExceeded at that moment, by a timer;
- its worker is gone: `close` fails all that wait for it, and the work itself fails for the one that computes.

Work runs in tasks of this object, never in the caller's, so that a caller that leaves does not take the computation
with it and free a slot that the device still fills.

Prior art: httpcore's connection pool (decide first, return what is owed, do it after).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Generic, Self, TypeVar

import msgspec
import structlog

from edge_agent.core.edge_queue import EdgeQueue, QueueTicket
from tidegate import clock
from tidegate.outcome import DeadlineExceeded, ServeError, Unreachable
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.types import Accepted

MOVED = 4
T = TypeVar("T")
log = structlog.get_logger(__name__)


class WorkResult(msgspec.Struct, Generic[T], frozen=True):  # one for every request, as the next
    """What the work returned, and how long it waited and ran (seconds)."""

    result: T
    queue_s: float
    compute_s: float


class _ScheduledWork(msgspec.Struct, eq=False):
    ticket: QueueTicket
    work: Callable[[], Awaitable[Any]]
    answer: asyncio.Future[WorkResult[Any]]
    queued_at: float


class EdgeScheduler:
    """Runs work inside `async with`, in the order and within the bounds of its queue.

    Args:
        on_moved: called when the number of waiting requests has changed by MOVED since the last call.
    """

    def __init__(self, queue: EdgeQueue, *, on_moved: Callable[[], None] = lambda: None) -> None:
        self._queue = queue
        self._on_moved = on_moved
        self._reported_queued = 0
        self._ids = count(1)
        self._jobs: dict[int, _ScheduledWork] = {}  # waiting or computing
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at: float | None = None  # when it rings
        self._closed = "has not started"

    async def __aenter__(self) -> Self:
        self._closed = ""
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = "is shutting down"
        for job in list(self._jobs.values()):
            if self._queue.remove(job.ticket.id):
                del self._jobs[job.ticket.id]
            _fail(job, Unreachable("the edge is shutting down"))
        await cancel_and_wait(*self._tasks)
        self._arm()

    @property
    def queued(self) -> int:
        return self._queue.queued

    @property
    def in_flight(self) -> int:
        return self._queue.in_flight

    @property
    def oldest_age_s(self) -> float:
        """The age of the request that has waited longest; 0 while none waits."""
        waits = [job.queued_at for job in self._jobs.values() if self._queue.is_waiting(job.ticket.id)]
        return clock.now() - min(waits) if waits else 0.0

    def queue_delay_s(self, now: float) -> float:
        """The predicted wait of a request that comes now."""
        return self._queue.queue_delay_s(now)

    def finish_in_s(self, *, deadline: float, cost_s: float, priority: int, lane: str) -> float:
        """The predicted time until such work would be done if it came now."""
        return self._queue.finish_in_s(QueueTicket(-1, lane, deadline, cost_s, priority), clock.now())

    async def run(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        lane: str,
        deadline: float,
        cost_s: float,
        priority: int = 0,
        group: str = "",
        compute_s: float | None = None,
        on_accepted: Callable[[Accepted], None] | None = None,
    ) -> WorkResult[T]:
        """Await `work()` when its turn comes. `on_accepted` is called before that, once it has a place.

        Raises:
            Overloaded: at once.
            DeadlineExceeded: at once, or when its deadline came or could not be made any more.
            Unreachable: this scheduler is not running, or `close` was called for its lane.
            Exception: whatever `work` raised.
        """
        if self._closed:
            raise Unreachable(f"the edge {self._closed}")
        now = clock.now()
        ticket = QueueTicket(next(self._ids), lane, deadline, cost_s, priority, group=group, compute_s=compute_s)
        accepted = self._queue.admit(ticket, now)
        job = self._jobs[ticket.id] = _ScheduledWork(ticket, work, asyncio.get_running_loop().create_future(), now)
        try:
            if on_accepted is not None:
                on_accepted(accepted)
            self._pump()
            return await job.answer
        finally:
            self._leave(ticket.id)

    def close(self, lane: str, reason: str) -> None:
        """Fail all requests that wait for `lane` with Unreachable, since its worker is gone."""
        for ticket in self._queue.close(lane):
            self._refuse(ticket.id, Unreachable(reason))
        self._pump()

    async def drained(self) -> None:
        """Return once no caller waits for an answer; a computation whose caller has left is not waited for."""
        while answers := [job.answer for job in self._jobs.values() if not job.answer.done()]:
            await asyncio.wait(answers)

    def _pump(self) -> None:
        """Refuse what is too late, start what may start, and arm the timer for the next."""
        now = clock.now()
        for ticket in self._queue.expire(now):
            waited_ms = (now - self._jobs[ticket.id].queued_at) * 1e3
            self._refuse(ticket.id, DeadlineExceeded(f"could not be done in time after waiting {waited_ms:.0f} ms"))
        while (taken := self._queue.take(now)) is not None:
            compute = self._compute(self._jobs[taken.id], now)
            task = asyncio.create_task(compute, name=f"compute {taken.lane} {taken.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._arm()
        if abs(self._queue.queued - self._reported_queued) >= MOVED:
            self._reported_queued = self._queue.queued
            self._on_moved()

    async def _compute(self, job: _ScheduledWork, started_at: float) -> None:
        give_up = asyncio.get_running_loop().call_at(job.ticket.deadline, _give_up, job)
        try:
            result = await job.work()
        except Exception as error:
            _fail(job, error)
        else:
            if not job.answer.done():
                job.answer.set_result(WorkResult(result, started_at - job.queued_at, clock.now() - started_at))
        finally:
            give_up.cancel()
            self._queue.finish(job.ticket.id)
            del self._jobs[job.ticket.id]
            self._pump()

    def _refuse(self, ticket_id: int, error: ServeError) -> None:
        """Refuse a request that has left the queue without being computed."""
        _fail(self._jobs.pop(ticket_id), error)

    def _leave(self, ticket_id: int) -> None:
        """The caller is gone: free its place if it still waits."""
        if self._queue.remove(ticket_id):
            del self._jobs[ticket_id]
            self._arm()

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
        return f"<EdgeScheduler {self._queue!r}>"


def _fail(job: _ScheduledWork, error: Exception) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)
    elif not isinstance(error, ServeError):
        log.error("work failed that nobody waits for any more", lane=job.ticket.lane, exc_info=error)


def _give_up(job: _ScheduledWork) -> None:
    """Fail a request whose deadline came during its computation; its slot stays taken until the end."""
    _fail(job, DeadlineExceeded("ran out of time while it was being computed"))

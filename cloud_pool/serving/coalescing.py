"""Coalescing lets requests with the same input that are here at the same time share one place in the queue.

A camera resends a frame, many users search for the same page: the second request needs the answer that the first is
about to get. It waits for that answer, takes no room in the queue and no row in a batch.

    ask ─▶ as urgent as one of its twins' places, or less?  ─ yes ─▶ waits for the first answer of any of them
                      │ no
                      └▶ takes a place of its own, and its twins may have its answer as well

So the earliest deadline rules: a more urgent request is not held up by a twin that can wait, and takes it along. When
one place has an answer, all twins have it, and other places are given back.

Invariants: each caller is answered once, and leaving touches no other. Only a place that no caller needs any more is
given back. When a place is refused because the most urgent twin would be late, another is taken for the twins with more
time. Nothing is kept once the last has its answer: this is no cache.

It can be wrong for a model with chance or memory in it, so a manifest must ask for it; and a caller that measures times
can tell that the same input was sent by another just now, so it is not for inputs that are secrets between tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from cloud_pool.core.batching.dedup import Urgency, input_fingerprint, joint_urgency
from cloud_pool.scheduling.job import PoolRequest, PoolResult
from tidegate.outcome import DeadlineExceeded
from tidegate.types import Accepted

Submit = Callable[[str, PoolRequest], Awaitable[PoolResult]]


@dataclass(slots=True, eq=False)
class _Caller:
    ask: PoolRequest
    answer: asyncio.Future[PoolResult]


@dataclass(slots=True, eq=False)
class _SharedRequest:
    """The callers with one input for one model instance, and their places in the queue, each with its request."""

    callers: list[_Caller] = field(default_factory=list)
    places: dict[asyncio.Task[PoolResult], PoolRequest] = field(default_factory=dict)
    accepted: Accepted | None = None


class Coalescer:
    """Mutable. `submit` is the scheduler's; `spared` counts the requests that needed no place of their own."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._twins: dict[tuple[str, bytes], _SharedRequest] = {}
        self.spared = 0

    async def submit(self, key: str, ask: PoolRequest) -> PoolResult:
        """As `Scheduler.submit`; the answer's times are those of this caller."""
        name = (key, input_fingerprint(ask.arrays))
        twins = self._twins.setdefault(name, _SharedRequest())
        caller = _Caller(ask, asyncio.get_running_loop().create_future())
        twins.callers.append(caller)
        self._join(name, twins, caller)
        try:
            return await caller.answer
        finally:
            twins.callers.remove(caller)
            if not caller.answer.cancel() and not caller.answer.cancelled():
                caller.answer.exception()  # seen, even when its caller was cancelled in the moment in which it was set
            if not twins.callers:
                self._end(name, twins)

    def __repr__(self) -> str:
        return f"<Coalescer {len(self._twins)} inputs, {self.spared} spared>"

    def _join(self, name: tuple[str, bytes], twins: _SharedRequest, caller: _Caller) -> None:
        if any(_urgency(ask).covers(_urgency(caller.ask)) for ask in twins.places.values()):
            self.spared += 1
            if caller.ask.on_accepted is not None and twins.accepted is not None:
                caller.ask.on_accepted(twins.accepted)
        else:
            self._take_place(name, twins, caller.ask)

    def _take_place(self, name: tuple[str, bytes], twins: _SharedRequest, ask: PoolRequest) -> None:
        def accepted(said: Accepted) -> None:
            first = twins.accepted is None
            twins.accepted = said
            for caller in twins.callers if first else [one for one in twins.callers if one.ask is ask]:
                if caller.ask.on_accepted is not None:
                    caller.ask.on_accepted(said)

        async def wait() -> PoolResult:
            return await self._submit(name[0], replace(ask, on_accepted=accepted))

        place = asyncio.create_task(wait(), name=f"a place for {len(twins.callers)} in {name[0]}")
        twins.places[place] = ask
        place.add_done_callback(lambda place: self._ended(name, twins, place))

    def _ended(self, name: tuple[str, bytes], twins: _SharedRequest, place: asyncio.Task[PoolResult]) -> None:
        ask = twins.places.pop(place, None)
        error = None if place.cancelled() else place.exception()
        if place.cancelled() or ask is None:
            return
        waiting = [caller for caller in twins.callers if not caller.answer.done()]
        if error is None:
            answer = place.result()
            for caller in waiting:
                caller.answer.set_result(_as_of(caller, answer, ask))
            self._end(name, twins)
        elif isinstance(error, DeadlineExceeded):
            self._was_late(name, twins, error, ask)
        elif not twins.places:
            for caller in waiting:
                caller.answer.set_exception(error)
            self._end(name, twins)

    def _was_late(
        self, name: tuple[str, bytes], twins: _SharedRequest, error: DeadlineExceeded, late: PoolRequest
    ) -> None:
        """Fail the callers with no more time as well; for the others there is a place, or it is taken now."""
        waiting = [caller for caller in twins.callers if not caller.answer.done()]
        for caller in waiting:
            if caller.ask.deadline <= late.deadline:
                caller.answer.set_exception(error)
        others = [caller for caller in waiting if caller.ask.deadline > late.deadline]
        if others and not twins.places:
            urgency = joint_urgency(_urgency(caller.ask) for caller in others)
            self._take_place(name, twins, replace(others[0].ask, deadline=urgency.deadline, priority=urgency.priority))

    def _end(self, name: tuple[str, bytes], twins: _SharedRequest) -> None:
        """End this group: none of its callers waits any more, and a caller that comes now begins another."""
        if self._twins.get(name) is twins:
            del self._twins[name]
        places, twins.places = list(twins.places), {}
        for place in places:
            place.cancel()


def _urgency(ask: PoolRequest) -> Urgency:
    return Urgency(ask.deadline, ask.priority)


def _as_of(caller: _Caller, answer: PoolResult, asked: PoolRequest) -> PoolResult:
    """The shared answer with the caller's own waiting time."""
    return replace(answer, queue_s=max(0.0, answer.queue_s - (caller.ask.arrived_at - asked.arrived_at)))

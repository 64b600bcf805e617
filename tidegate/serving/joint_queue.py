"""A joint queue reports the load of a target that has one queue for single answers and others for generations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class TargetQueue(Protocol):
    """What load reports say of the queue before the workers."""

    @property
    def queued(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    def queue_delay_s(self, now: float) -> float: ...


class JointQueue:
    """A `TargetQueue` over several. Its wait is the longest of theirs: a report has one number for all models."""

    def __init__(self, first: TargetQueue, others: Callable[[], Iterable[TargetQueue]]) -> None:
        self._first = first
        self._others = others

    @property
    def queued(self) -> int:
        return self._first.queued + sum([one.queued for one in self._others()])

    @property
    def in_flight(self) -> int:
        return self._first.in_flight + sum([one.in_flight for one in self._others()])

    def queue_delay_s(self, now: float) -> float:
        return max([self._first.queue_delay_s(now), *[one.queue_delay_s(now) for one in self._others()]])

    def __repr__(self) -> str:
        return f"<JointQueue {self.queued} waiting, {self.in_flight} in flight>"

"""The deadline observer reports each call that ended past its deadline, answered or not."""

from __future__ import annotations

from collections.abc import Callable

from tidegate.outcome import DeadlineExceeded
from tidegate.types import Call, Reply


class DeadlineObserver:
    """Args: on_missed: called with the arrival and the end of such a call."""

    def __init__(self, on_missed: Callable[[float, float], None]) -> None:
        self._on_missed = on_missed

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        if reply.budget_left_s is not None and reply.budget_left_s < 0.0:
            self._on_missed(call.arrived_at, now)

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        if isinstance(error, DeadlineExceeded):
            self._on_missed(call.arrived_at, now)

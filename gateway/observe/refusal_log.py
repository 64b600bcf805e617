"""Remembers requests that were turned away before anybody placed them: shed, expired, quarantined, without the right.

An observer of the stack. Who was placed is remembered by its flight, and its error has the request's name already;
everybody else who was refused gets a line of his own, since what a gateway refuses belongs to the traffic that it had.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.history.decision_record import Weighing, weighed
from gateway.core.history.recorder import Flown, Memory, shortened, trace_id_of
from gateway.core.placement.placer import Ask, Decision
from tidegate.outcome import ServeError
from tidegate.types import Call, Reply


class TurnedAway:
    """An `Observer`. `ask` reads a call's work, which only a recording wants to know of somebody who got none done."""

    def __init__(self, memory: Memory, ask: Callable[[Call], Ask]) -> None:
        self._memory = memory
        self._ask = ask

    def began(self, call: Call) -> None:
        """Nobody knows yet."""

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        """Its flight remembers it."""

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        if not isinstance(error, ServeError) or error.request_id:
            return
        memory, request = self._memory, call.request
        number = memory.next_number()
        memory.add(
            Flown(
                number,
                shortened(request.id),
                trace_id_of(call),
                call.protocol,
                request.model_name,
                call.tenant,
                call.arrived_at,
                now,
                now,
                now,
                self._work(call, now) if memory.recording else None,
                (),
                (),
                shortened(f"{error.code}: {error.message}"),
                now - call.arrived_at,
                call.deadline,
            )
        )
        error.request_id = memory.name_of(number)

    def _work(self, call: Call, now: float) -> Weighing | None:
        due = call if call.deadline is not None else call.due(now)
        try:
            return weighed(Decision(now, self._ask(due), (), None, "", None))
        except ServeError:  # it was turned away because it cannot be read
            return None

    def __repr__(self) -> str:
        return f"<TurnedAway into {self._memory!r}>"

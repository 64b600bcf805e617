"""Records of requests that were refused before they were placed, in the flight recorder.

An observer of the stack. A request that was placed is recorded by its execution, and its error has the request's id
already. Every other refused request gets a record of its own, since what a gateway refuses belongs to its traffic.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.history.decision_record import DecisionRecord, pack_decision
from gateway.core.history.recorder import FlightRecorder, RequestRecord, trace_id_of, truncated_words
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Decision
from tidegate.outcome import ServeError
from tidegate.types import Call, Reply


class RefusalLog:
    """An `Observer`. `ask` reads a call's work, which is worth the cost only during a recording."""

    def __init__(self, memory: FlightRecorder, ask: Callable[[Call], Ask]) -> None:
        self._memory = memory
        self._ask = ask

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        """Its execution has recorded it."""

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        if not isinstance(error, ServeError) or error.request_id:
            return
        memory, request = self._memory, call.request
        number = memory.next_number()
        memory.add(
            RequestRecord(
                number=number,
                request_id=truncated_words(request.id),
                trace_id=trace_id_of(call),
                protocol=call.protocol,
                model=request.model_name,
                tenant=call.tenant,
                arrived_at=call.arrived_at,
                taken_at=now,
                asked_at=now,
                placed_at=now,
                decision=self._work(call, now) if memory.recording else None,
                reasons=(),
                notes=(),
                end=truncated_words(f"{error.code}: {error.message}"),
                elapsed_s=now - call.arrived_at,
                deadline=call.deadline,
            )
        )
        error.request_id = memory.name_of(number)

    def _work(self, call: Call, now: float) -> DecisionRecord | None:
        due = call if call.deadline is not None else call.due(now)
        try:
            return pack_decision(Decision(now, self._ask(due), (), None, "", None))
        except ServeError:  # it was turned away because it cannot be read
            return None

    def __repr__(self) -> str:
        return f"<RefusalLog into {self._memory!r}>"

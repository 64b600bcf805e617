"""One kept request as spans, made of its record: the same waterfall that `tidegate explain` prints.

    infer MODEL                     server, from the request's arrival to its end
      admit · classify · place …    one for each stage of the gateway's own, in order
      attempt TARGET                client, for each attempt; the target's own spans are children of it
        link out · queue · batch wait · compute · link back

Attempts carry the ids under which they were sent, so that what a target exports falls into place.
"""

from __future__ import annotations

from typing import Final

from gateway.core.history.recorder import Flown, Given
from gateway.core.history.waterfall import Bar, Stage, waterfall
from tidegate.trace_context import Trace
from tidegate.tracing.propagation import attempt_id
from tidegate.tracing.span import Event, Span, Value

_FIRST_STAGE: Final = 64


def spans_of(trace: Trace, flown: Flown) -> list[Span]:
    fall = waterfall(flown)
    maker = _Maker(trace, flown.arrived_at)
    given = flown.end if isinstance(flown.end, Given) else None
    root = Span(
        f"infer {flown.model}",
        trace.trace_id,
        trace.span_id,
        trace.parent_id,
        flown.arrived_at,
        flown.ended_at,
        _attributes(flown, given),
        "server",
        "" if given is not None else str(flown.end),
        state=trace.state,
    )
    inside = {stage for bar in fall.bars for stage in bar.stages}
    own = [maker.stage(stage, trace.span_id) for stage in fall.path if stage not in inside]
    return [root, *own, *(span for bar in fall.bars for span in maker.attempt(bar, flown))]


class _Maker:
    """Counts the stages' ids up."""

    def __init__(self, trace: Trace, arrived_at: float) -> None:
        self._trace = trace
        self._arrived_at = arrived_at
        self._stages = _FIRST_STAGE

    def stage(self, stage: Stage, parent_id: int) -> Span:
        self._stages += 1
        words: dict[str, Value] = {"tidegate.note": stage.words} if stage.words else {}
        return self._span(stage.name, self._stages, parent_id, stage.start_s, stage.took_s, words)

    def attempt(self, bar: Bar, flown: Flown) -> list[Span]:
        own_id = attempt_id(self._trace, bar.attempt)
        began_at = self._arrived_at + bar.start_s
        attributes: dict[str, Value] = {
            "tidegate.target": bar.target,
            "tidegate.variant": bar.variant,
            "tidegate.reason": bar.why,
            "tidegate.end": bar.end or "left",
            "tidegate.predicted_s": bar.predicted_s,
        }
        acked = [note.at for note in flown.notes if note.what == "accepted" and note.attempt == bar.attempt]
        span = Span(
            f"attempt {bar.target}",
            self._trace.trace_id,
            own_id,
            self._trace.span_id,
            began_at,
            began_at + bar.took_s,
            attributes,
            "client",
            bar.words if bar.end == "failed" else "",
            events=tuple(Event("accepted", at) for at in acked),
            state=self._trace.state,
        )
        return [span, *(self.stage(stage, own_id) for stage in bar.stages)]

    def _span(
        self, name: str, number: int, parent_id: int, start_s: float, took_s: float, attributes: dict[str, Value]
    ) -> Span:
        began_at = self._arrived_at + start_s
        own_id = self._trace.child_id(number)
        return Span(name, self._trace.trace_id, own_id, parent_id, began_at, began_at + max(0.0, took_s), attributes)


def _attributes(flown: Flown, given: Given | None) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "tidegate.model": flown.model,
        "tidegate.protocol": flown.protocol,
        "tidegate.outcome": flown.outcome,
        "tidegate.number": flown.number,
    }
    if flown.request_id:
        attributes["tidegate.request_id"] = flown.request_id
    if flown.tenant:
        attributes["tidegate.tenant"] = flown.tenant
    if flown.deadline is not None:
        attributes["tidegate.budget_s"] = flown.deadline - flown.arrived_at
    if given is not None:
        attributes |= {
            "tidegate.served_by": given.served_by,
            "tidegate.variant": given.variant,
            "tidegate.reason": given.reason,
            "tidegate.attempts": given.attempts,
            "tidegate.hedged": given.hedged,
            "tidegate.fallback": given.fallback,
        }
    return attributes

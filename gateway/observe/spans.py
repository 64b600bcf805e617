"""One kept request as spans, made of its record: the same waterfall that `tidegate explain` prints.

    infer MODEL                     server, from the request's arrival to its end
      admit · classify · place …    one for each stage of the gateway's own, in order
      attempt TARGET                client, for each attempt; the target's own spans are children of it
        link out · queue · batch wait · compute · link back

Attempts carry the ids under which they were sent, so that what a target exports falls into place.
"""

from __future__ import annotations

from typing import Final

from gateway.core.history.recorder import AnswerRecord, RequestRecord
from gateway.core.history.waterfall import AttemptBar, WaterfallStage, waterfall
from tidegate.caller import tenant_of
from tidegate.trace_context import Trace
from tidegate.tracing.propagation import attempt_span_id
from tidegate.tracing.span import Span, SpanEvent, Value
from tidegate.types import Route

_FIRST_STAGE: Final = 64
_EVENTS: Final = {"accepted": "accepted", "begun": "first token"}  # of an attempt, by what they are called in records


def spans_of(trace: Trace, record: RequestRecord) -> list[Span]:
    fall = waterfall(record)
    maker = _SpanBuilder(trace, record.arrived_at)
    route = record.end.route if isinstance(record.end, AnswerRecord) else None
    root = Span(
        name=f"infer {record.model}",
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        began_at=record.arrived_at,
        ended_at=record.ended_at,
        attributes=_attributes(record, route),
        kind="server",
        error="" if route is not None else str(record.end),
        state=trace.state,
    )
    inside = {stage for bar in fall.bars for stage in bar.stages}
    own = [maker.stage(stage, trace.span_id) for stage in fall.path if stage not in inside]
    return [root, *own, *(span for bar in fall.bars for span in maker.attempt(bar, record))]


class _SpanBuilder:
    """Counts the stages' ids up."""

    def __init__(self, trace: Trace, arrived_at: float) -> None:
        self._trace = trace
        self._arrived_at = arrived_at
        self._stages = _FIRST_STAGE

    def stage(self, stage: WaterfallStage, parent_id: int) -> Span:
        self._stages += 1
        words: dict[str, Value] = {"tidegate.note": stage.words} if stage.words else {}
        return self._span(stage.name, self._stages, parent_id, stage.start_s, stage.took_s, words)

    def attempt(self, bar: AttemptBar, record: RequestRecord) -> list[Span]:
        own_id = attempt_span_id(self._trace, bar.attempt)
        began_at = self._arrived_at + bar.start_s
        attributes: dict[str, Value] = {
            "tidegate.target": bar.target,
            "tidegate.variant": bar.variant,
            "tidegate.reason": bar.why,
            "tidegate.end": bar.end or "left",
            "tidegate.predicted_s": bar.predicted_s,
        }
        own = [note for note in record.notes if note.attempt == bar.attempt]
        events = [SpanEvent(_EVENTS[note.what], note.at) for note in own if note.what in _EVENTS]
        span = Span(
            name=f"attempt {bar.target}",
            trace_id=self._trace.trace_id,
            span_id=own_id,
            parent_id=self._trace.span_id,
            began_at=began_at,
            ended_at=began_at + bar.took_s,
            attributes=attributes,
            kind="client",
            error=bar.words if bar.end == "failed" else "",
            events=tuple(events),
            state=self._trace.state,
        )
        return [span, *(self.stage(stage, own_id) for stage in bar.stages)]

    def _span(
        self, name: str, number: int, parent_id: int, start_s: float, took_s: float, attributes: dict[str, Value]
    ) -> Span:
        began_at = self._arrived_at + start_s
        own_id = self._trace.child_id(number)
        return Span(
            name=name,
            trace_id=self._trace.trace_id,
            span_id=own_id,
            parent_id=parent_id,
            began_at=began_at,
            ended_at=began_at + max(0.0, took_s),
            attributes=attributes,
        )


def _attributes(record: RequestRecord, route: Route | None) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "tidegate.model": record.model,
        "tidegate.protocol": record.protocol,
        "tidegate.outcome": record.outcome,
        "tidegate.number": record.number,
    }
    if record.request_id:
        attributes["tidegate.request_id"] = record.request_id
    if record.tenant:
        attributes["tidegate.tenant"] = tenant_of(record.tenant)
    if record.deadline is not None:
        attributes["tidegate.budget_s"] = record.deadline - record.arrived_at
    if route is not None:
        attributes |= {
            "tidegate.served_by": route.served_by,
            "tidegate.variant": route.variant,
            "tidegate.reason": route.reason,
            "tidegate.attempts": route.attempts,
            "tidegate.hedged": route.hedged,
            "tidegate.fallback": route.fallback,
        }
    return attributes

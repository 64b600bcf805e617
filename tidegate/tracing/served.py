"""A target's part in a trace: one span for each sampled request that it served, and one for each of their batches.

The gateway reports most of it already, from the stage times that come with each answer; only the target knows its own
steps, and the batch-mates of a request. A batch belongs to several traces and so to none: it is
a span of its own, with a link to each sampled member. A generation has its own steps, one span for its prompt and one
for all tokens behind the first. Without a collector nothing is made, but logs name the trace.

Only requests that the caller marks as sampled get spans here: a request that a gateway keeps because it was late is
reported by the gateway alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidegate import clock
from tidegate.generate.usage import Usage, usage_if_generated
from tidegate.trace_context import PARENT_KEY, STATE_KEY, Bits, Trace, current, join_trace
from tidegate.tracing.collector import Collector
from tidegate.tracing.span import Span, SpanLink, Value
from tidegate.types import Call, Reply


class ServedTraces:
    """Args:
    place: "edge/NAME" or "pool/NAME".
    collector: None: logs alone name the trace.
    """

    def __init__(self, place: str, bits: Bits, collector: Collector | None = None) -> None:
        self._collector = collector
        self._place = place
        self._bits = bits

    def begin(self, call: Call) -> Trace | None:
        """The request's place in its caller's trace, which logs name from here on; None without a caller's trace."""
        parent = call.headers.get(PARENT_KEY)
        trace = join_trace(parent, call.headers.get(STATE_KEY, ""), self._bits) if parent else None
        current.set(trace)
        return trace

    def answered(self, trace: Trace | None, call: Call, reply: Reply) -> None:
        if trace is not None and trace.kept and self._collector is not None:
            took: dict[str, Value] = {f"tidegate.{stage}_s": seconds for stage, seconds in reply.stages.items()}
            took |= {
                "tidegate.batch_wait_s": reply.batch_wait_s,
                "tidegate.batch_rows": reply.batch_size,
                "tidegate.variant": reply.variant,
            }
            usage = usage_if_generated(reply.response)
            if usage is None:
                self._collector.add([self._span(trace, call, took)])
            else:
                own = self._span(trace, call, took | _usage_words(usage))
                self._collector.add([own, *_generation_spans(trace, own, usage, reply.stages.get("queue", 0.0))])

    def ended(self, trace: Trace | None, call: Call, error: BaseException) -> None:
        if trace is not None and trace.kept and self._collector is not None:
            self._collector.add([self._span(trace, call, {}, str(error) or type(error).__name__)])

    def computed(
        self, members: Iterable[Trace], began_at: float, ended_at: float, attributes: Mapping[str, Value]
    ) -> None:
        """A batch is done. `members`: its sampled requests; without any there is no span."""
        links = tuple(SpanLink(one.trace_id, one.span_id) for one in members)
        if links and self._collector is not None:
            trace_id, span_id = self._bits(128) or 1, self._bits(64) or 1
            name = f"batch {self._place}"
            batch = Span(
                name=name,
                trace_id=trace_id,
                span_id=span_id,
                parent_id=0,
                began_at=began_at,
                ended_at=ended_at,
                attributes=attributes,
                kind="consumer",
                links=links,
            )
            self._collector.add([batch])

    def _span(self, trace: Trace, call: Call, attributes: Mapping[str, Value], error: str = "") -> Span:
        return Span(
            name=f"serve {call.request.model_name}",
            trace_id=trace.trace_id,
            span_id=trace.span_id,
            parent_id=trace.parent_id,
            began_at=call.arrived_at,
            ended_at=clock.now(),
            attributes={"tidegate.target": self._place, **attributes},
            kind="server",
            error=error,
            state=trace.state,
        )

    def __repr__(self) -> str:
        return f"<ServedTraces of {self._place}>"


def _usage_words(usage: Usage) -> dict[str, Value]:
    """In OpenTelemetry's words, as far as it has them."""
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.response.finish_reasons": usage.finish_reason,
        "tidegate.cached_tokens": usage.cached_tokens,
    }


def _generation_spans(trace: Trace, own: Span, usage: Usage, queue_s: float) -> list[Span]:
    """What it did once it had a slot: it took the prompt, and then gave the other tokens until its end.

    The second span ends with the answer and so has the pauses of its reader, which the engine's own time leaves out.
    """
    begins_at = min(own.ended_at, own.began_at + queue_s)
    first_at = min(own.ended_at, begins_at + usage.prefill_s)
    steps: tuple[tuple[str, float, float, dict[str, Value]], ...] = (
        ("prefill", begins_at, first_at, {"tidegate.computed_tokens": usage.prompt_tokens - usage.cached_tokens}),
        ("decode", first_at, own.ended_at, {"tidegate.decode_s": usage.decode_s}),
    )
    return [
        own._replace(
            name=name,
            span_id=trace.child_id(number),
            parent_id=own.span_id,
            began_at=began_at,
            ended_at=ended_at,
            attributes=words,
            kind="internal",
        )
        for number, (name, began_at, ended_at, words) in enumerate(steps, 1)
    ]

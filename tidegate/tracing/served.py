"""A target's part in a trace: one span for each sampled request that it served, and one for each batch with any in it.

The gateway tells most of it already, from the stage times that come with each answer; what only the target knows is
what it was doing itself, and with whom a request was computed. A batch belongs to several traces and so to none: it is
a span of its own, with a link to each sampled member. Without a collector nothing is made, but logs name the trace.

Only requests whose caller says that they are sampled are told of: what a gateway keeps because it turned out late, it
tells itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidegate import clock
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
        """The request's place in its caller's trace, which logs name from here on; None where he brought none."""
        said = call.headers.get(PARENT_KEY)
        trace = join_trace(said, call.headers.get(STATE_KEY, ""), self._bits) if said else None
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
            self._collector.add([self._span(trace, call, took)])

    def ended(self, trace: Trace | None, call: Call, error: BaseException) -> None:
        if trace is not None and trace.kept and self._collector is not None:
            self._collector.add([self._span(trace, call, {}, str(error) or type(error).__name__)])

    def computed(
        self, members: Iterable[Trace], began_at: float, ended_at: float, attributes: Mapping[str, Value]
    ) -> None:
        """A batch is done. `members`: those of its requests that are sampled; without any it is not told of."""
        links = tuple(SpanLink(one.trace_id, one.span_id) for one in members)
        if links and self._collector is not None:
            trace_id, span_id = self._bits(128) or 1, self._bits(64) or 1
            name = f"batch {self._place}"
            self._collector.add(
                [Span(name, trace_id, span_id, 0, began_at, ended_at, attributes, "consumer", links=links)]
            )

    def _span(self, trace: Trace, call: Call, attributes: Mapping[str, Value], error: str = "") -> Span:
        return Span(
            f"serve {call.request.model_name}",
            trace.trace_id,
            trace.span_id,
            trace.parent_id,
            call.arrived_at,
            clock.now(),
            {"tidegate.target": self._place, **attributes},
            "server",
            error,
            state=trace.state,
        )

    def __repr__(self) -> str:
        return f"<ServedTraces of {self._place}>"

"""Which trace a call belongs to, for all that lies further in: the caller's, or one that begins here.

Outermost of all, so that whatever is logged or counted for a call can name its trace. What is told to the caller is the
trace that he brought, or one that is kept: an id of a trace that nobody will find is of no use to him.

A `traceparent` comes as header, as gRPC metadata, or as an OIP request parameter, which is where clients that hide
headers can say it.
"""

from __future__ import annotations

from msgspec.structs import replace

from gateway.layers.stack import Layer, Service
from tidegate.trace_context import PARENT_KEY, STATE_KEY, Bits, Trace, current, join_trace, start_trace
from tidegate.types import Call, Reply


def traced(bits: Bits, ratio: float) -> Layer:
    """Args: ratio: the share of traces that begin here which is sampled."""

    def trace_of(call: Call) -> Trace:
        headers, parameters = call.headers, call.request.parameters
        said = headers.get(PARENT_KEY) or (parameters.get(PARENT_KEY) if parameters else None)
        if isinstance(said, str):
            state = headers.get(STATE_KEY) or parameters.get(STATE_KEY, "")
            if (trace := join_trace(said, state if isinstance(state, str) else "", bits)) is not None:
                return trace
        return start_trace(bits, ratio)

    def layer(inner: Service) -> Service:
        async def service(call: Call) -> Reply:
            trace = trace_of(call)
            before = current.set(trace)
            try:
                reply = await inner(call.traced(trace))
            finally:
                current.reset(before)
            if trace.kept or trace.parent_id:
                return replace(reply, traceparent=trace.traceparent())
            return reply

        return service

    return layer

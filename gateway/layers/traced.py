"""Determine the trace of a call, for all layers further in: the caller's trace, or one that begins here.

This is the outermost layer, so that everything that is logged or counted for a call can name its trace. The reply names
the trace that the caller sent, or one that is kept: the id of a trace that is not stored is of no use to a caller.

A `traceparent` comes as header, as gRPC metadata, or as an OIP request parameter, for clients that cannot set headers.
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

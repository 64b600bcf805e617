"""The trace context under which each attempt of a request is sent to its target."""

from __future__ import annotations

from typing import Final

from tidegate.trace_context import PARENT_KEY, STATE_KEY, Trace
from tidegate.types import Call

FIRST_ATTEMPT: Final = 1  # of the request's children by number; attempts are few


def attempt_span_id(trace: Trace, attempt: int) -> int:
    """The span of one attempt."""
    return trace.child_id(FIRST_ATTEMPT + attempt)


def outgoing_context(call: Call, attempt: int) -> tuple[str, str]:
    """The traceparent and tracestate under which an attempt is sent; without tracing, the caller's own.

    A trace that begins here and is not sampled is not passed on: its target would have nothing to report.
    """
    trace = call.trace
    if trace is None:
        return call.headers.get(PARENT_KEY, ""), call.headers.get(STATE_KEY, "")
    if not trace.kept and not trace.parent_id:
        return "", ""
    return trace.traceparent(attempt_span_id(trace, attempt)), trace.state

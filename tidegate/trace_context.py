"""W3C Trace Context: the trace that a request belongs to, and the headers that pass it on.

A `Trace` exists for each request where tracing is on; without it a caller's `traceparent` is passed on as it came. It
is made of numbers and formatted only if it is exported or logged, since most traces never are. Span ids of the steps
within the request are counted up from its own id, so that they need no further random numbers.

    sampled   the caller's flag where there is a caller's trace, else a share of all, by the trace id alone: every
              process with the same rule decides alike
    kept      its spans are made: it is sampled, or it turned out late, hedged or failed

`current` is the trace of the request that the running code works for; logs read it.

Pure, but for the context variable. Source: W3C Trace Context (level 1); OpenTelemetry, TraceIdRatioBased.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

PARENT_KEY: Final = "traceparent"
STATE_KEY: Final = "tracestate"
MOST_STATE: Final = 512  # characters that the specification requires every participant to propagate
_SAMPLED: Final = 1
_IDS: Final = 2**64 - 1
_FORM: Final = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Bits = Callable[[int], int]  # so many bits of chance


class Trace:
    """One request's place in its trace. Mutable: `kept` is settled at the request's end."""

    __slots__ = ("kept", "parent_id", "sampled", "span_id", "state", "trace_id")

    def __init__(self, trace_id: int, span_id: int, *, parent_id: int = 0, sampled: bool, state: str = "") -> None:
        """Args: parent_id: the caller's span; 0: the trace begins here."""
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id
        self.sampled = sampled
        self.kept = sampled
        self.state = state

    @property
    def hex_id(self) -> str:
        return f"{self.trace_id:032x}"

    def child_id(self, number: int) -> int:
        """The id of the request's part of this number, from 1."""
        return (self.span_id + number) & _IDS or 1

    def traceparent(self, span_id: int | None = None) -> str:
        """The header that names this span, by default the request's own, as the parent."""
        own = self.span_id if span_id is None else span_id
        return f"00-{self.trace_id:032x}-{own:016x}-{int(self.kept):02x}"

    def __repr__(self) -> str:
        return f"<Trace {self.hex_id}{' kept' if self.kept else ''}>"


current: ContextVar[Trace | None] = ContextVar("tidegate_trace", default=None)


def start_trace(bits: Bits, ratio: float) -> Trace:
    """A trace that begins here, sampled with this chance."""
    trace_id = bits(128) or 1
    return Trace(trace_id, bits(64) or 1, sampled=trace_id & _IDS < ratio * 2.0**64)


def join_trace(traceparent: str, tracestate: str, bits: Bits) -> Trace | None:
    """The caller's trace with a span of our own; None if the value is no traceparent."""
    found = _FORM.fullmatch(traceparent)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, parent_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not parent_id:
        return None
    sampled = bool(int(found[4], 16) & _SAMPLED)
    state = tracestate if len(tracestate) <= MOST_STATE else ""
    return Trace(trace_id, bits(64) or 1, parent_id=parent_id, sampled=sampled, state=state)

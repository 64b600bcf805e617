"""The data type of a span, which is made after the fact from instants that were recorded anyway.

Nothing is opened while a request runs, and nothing is allocated for requests that are not kept. Instants are of this
process' monotonic clock; the exporter converts them to wall-clock time (`export.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

Value = str | bool | int | float
Kind = Literal["internal", "server", "client", "consumer"]
_NONE: Final[Mapping[str, Value]] = MappingProxyType({})


class SpanLink(NamedTuple):
    """Another span that this one has to do with, in whatever trace."""

    trace_id: int
    span_id: int


class SpanEvent(NamedTuple):
    name: str
    at: float


class Span(NamedTuple):
    name: str
    trace_id: int
    span_id: int
    parent_id: int  # 0: it has none
    began_at: float
    ended_at: float
    attributes: Mapping[str, Value] = _NONE
    kind: Kind = "internal"
    error: str = ""  # why it failed, in words
    links: tuple[SpanLink, ...] = ()
    events: tuple[SpanEvent, ...] = ()
    state: str = ""  # tracestate

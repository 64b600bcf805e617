"""How an answer says where it was made, why, and how much of its budget is left.

The same words travel three times, because every client library hides something: as HTTP headers, as gRPC trailing
metadata, and as `parameters` of the OIP response, the only place that an unmodified tritonclient shows its caller. A
fallback, a hedge or a lower precision is therefore never silent.

    tidegate-served-by: edge/attic
    tidegate-route: cheapest; variant=int8; attempts=1; hedged=0; fallback=0; degraded=0
    tidegate-budget-left-ms: 1874.2
    server-timing: classify;dur=0.1, queue;dur=0.0, link;dur=1.9, compute;dur=8.4

A target's answer also carries its load, as ORCA's text form in `endpoint-load-metrics`, so that whoever calls it with
plain unary calls knows as much as one who holds a link stream. Names are lower case: gRPC demands it.

Source: ORCA open request cost aggregation (xDS); W3C Server-Timing.
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import Final

from tidegate.types import LoadReport, Reply, Route

SERVED_BY_KEY: Final = "tidegate-served-by"
ROUTE_KEY: Final = "tidegate-route"
BUDGET_LEFT_KEY: Final = "tidegate-budget-left-ms"
TIMING_KEY: Final = "server-timing"
LOAD_KEY: Final = "endpoint-load-metrics"

_LOAD_FIELDS: Final = ("epoch", "sequence", "queued", "in_flight", "queue_delay_s")
_LOAD_PREFIX: Final = "named_metrics.tidegate_"


def reply_headers(reply: Reply) -> dict[str, str]:
    """Headers (or trailing metadata) of an answer; only what the reply knows."""
    headers = reply_parameters(reply)
    if reply.load is not None:
        headers[LOAD_KEY] = load_text(reply.load)
    return headers


def reply_parameters(reply: Reply) -> dict[str, str]:
    """The same as OIP response parameters; a target's load is for machines and stays out."""
    words: dict[str, str] = {}
    route = reply.route
    if route is not None:
        words[SERVED_BY_KEY] = route.served_by
        words[ROUTE_KEY] = route_text(route)
    if reply.budget_left_s is not None:
        words[BUDGET_LEFT_KEY] = f"{reply.budget_left_s * 1e3:.1f}"
    if reply.stages:
        words[TIMING_KEY] = ", ".join([f"{stage};dur={taken_s * 1e3:.3f}" for stage, taken_s in reply.stages.items()])
    return words


@lru_cache(maxsize=1024)  # a few targets, reasons and variants make up nearly all answers
def route_text(route: Route) -> str:
    return (
        f"{route.reason}; variant={route.variant}; attempts={route.attempts}; "
        f"hedged={route.hedged:d}; fallback={route.fallback:d}; degraded={route.degraded:d}"
    )


def load_text(load: LoadReport) -> str:
    """The load in ORCA's text form."""
    return "TEXT " + ", ".join([f"{_LOAD_PREFIX}{field}={getattr(load, field)}" for field in _LOAD_FIELDS])


def load_from_text(text: str) -> LoadReport | None:
    """The load that a target's trailer reports; None where it is foreign or damaged, for a report is only advice."""
    pairs = dict(part.strip().partition("=")[::2] for part in text.removeprefix("TEXT ").split(","))
    try:
        epoch, sequence, queued, in_flight = (int(pairs[_LOAD_PREFIX + field]) for field in _LOAD_FIELDS[:4])
        queue_delay_s = float(pairs[_LOAD_PREFIX + "queue_delay_s"])
    except (KeyError, ValueError):
        return None
    if min(epoch, sequence, queued, in_flight) < 0 or not isfinite(queue_delay_s) or queue_delay_s < 0:
        return None
    return LoadReport(epoch, sequence, queued, in_flight, queue_delay_s)

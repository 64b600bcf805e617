"""The headers of an answer: where it was made, why there, and how much of its budget is left.

The same words travel three times, because every client library hides something: as HTTP headers, as gRPC trailing
metadata, and as `parameters` of the OIP response, the only place that an unmodified tritonclient shows its caller. A
fallback, a hedge, a lower precision or an answer that its model is not sure of is therefore never silent.

    tidegate-served-by: edge/attic
    tidegate-route: cheapest; variant=int8; attempts=1; hedged=0; fallback=0; degraded=0; provisional=0
    tidegate-site-route: edge/attic; cheapest; variant=int8; attempts=1; …             of a site: its own two
    tidegate-resumed: from=edge/attic to=pool/main at=57 gap-ms=212 grade=exact        if others went on with it
    tidegate-split: head=edge/attic variant=int8 layer=/body/Relu_3       if the model was cut between layers
    tidegate-fallback-model: digits-small           if another model than the one asked for answers
    tidegate-last-known: age-s=41.2; of=input       if nothing else was to be had than an old answer
    tidegate-helped-by: gateway/main; because=unfit; chosen=only   of a device that had its gateway answer
    tidegate-cut: its tenant's tokens are used up                                      if it ends before its time
    tidegate-attested: software; key=3f9a0c11d2e4a8b7; expires=2026-11-20T20:31:00Z   if it was required
    tidegate-sequence-home: MTc2…fQ.3s9…                of a step of a sequence, to be sent with the next one
    tidegate-budget-left-ms: 1874.2
    tidegate-request-id: 3fa09-1042                 the id for `tidegate explain`; also beside an error
    server-timing: classify;dur=0.1, queue;dur=0.0, link;dur=1.9, compute;dur=8.4

A target's answer also carries its load, for machines (`orca.py`). Names are lower case: gRPC demands it.

Source: W3C Server-Timing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final
from urllib.parse import quote

from tidegate.trace_context import PARENT_KEY
from tidegate.types import PLANNED, Reply, Resumed, Route

SERVED_BY_KEY: Final = "tidegate-served-by"
ROUTE_KEY: Final = "tidegate-route"
SITE_ROUTE_KEY: Final = "tidegate-site-route"
RESUMED_KEY: Final = "tidegate-resumed"
SPLIT_KEY: Final = "tidegate-split"
CUT_KEY: Final = "tidegate-cut"
ATTESTED_KEY: Final = "tidegate-attested"
BUDGET_LEFT_KEY: Final = "tidegate-budget-left-ms"
TIMING_KEY: Final = "server-timing"
HELPED_BY_KEY: Final = "tidegate-helped-by"
FALLBACK_MODEL_KEY: Final = "tidegate-fallback-model"
LAST_KNOWN_KEY: Final = "tidegate-last-known"
HOME_KEY: Final = "tidegate-sequence-home"
REQUEST_ID_KEY: Final = "tidegate-request-id"
_PLAIN: Final = "/:;,.()[]{}@!*'"  # of a tensor's name, which may hold anything, and a header may not


def reply_parameters(reply: Reply) -> dict[str, str]:
    """Headers, trailing metadata and OIP response parameters of an answer; only those that the reply has."""
    words: dict[str, str] = {}
    if reply.route is not None:
        words |= route_words(reply.route)
    if reply.fallback_model:
        words[FALLBACK_MODEL_KEY] = reply.fallback_model
    if reply.last_known:
        words[LAST_KNOWN_KEY] = reply.last_known
    if reply.helped_by:
        words[HELPED_BY_KEY] = reply.helped_by
    if reply.cut:
        words[CUT_KEY] = reply.cut
    if reply.attested:
        words[ATTESTED_KEY] = reply.attested
    if reply.budget_left_s is not None:
        words[BUDGET_LEFT_KEY] = f"{reply.budget_left_s * 1e3:.1f}"
    if reply.sequence_home:
        words[HOME_KEY] = reply.sequence_home
    if reply.request_id:
        words[REQUEST_ID_KEY] = reply.request_id
    if reply.traceparent:
        words[PARENT_KEY] = reply.traceparent
    if reply.stages:
        stages = reply.stages
        words[TIMING_KEY] = _timing_format(tuple(stages)) % tuple([taken_s * 1e3 for taken_s in stages.values()])
    return words


def route_words(route: Route) -> dict[str, str]:
    """The part of them that says where, which is known before an answer has ended."""
    words = {SERVED_BY_KEY: route.served_by, ROUTE_KEY: route_text(route)}
    if route.inner is not None:
        words[SITE_ROUTE_KEY] = f"{route.inner.served_by}; {route_text(route.inner)}"
    if (head := route.head) is not None:
        words[SPLIT_KEY] = f"head={head.served_by} variant={head.variant} layer={quote(head.layer, safe=_PLAIN)}"
    if route.resumed:
        words[RESUMED_KEY] = ", ".join(map(resumed_text, route.resumed))
    return words


def resumed_text(resumed: Resumed) -> str:
    gap_ms = round(resumed.gap_s * 1e3)
    words = f"from={resumed.lost} to={resumed.by} at={resumed.at} gap-ms={gap_ms} grade={resumed.grade}"
    return f"{words} reason={resumed.why}" if resumed.why == PLANNED else words  # nothing was wrong with the first


@lru_cache(maxsize=64)  # of a few sets of stages
def _timing_format(stages: tuple[str, ...]) -> str:
    return ", ".join([f"{stage.replace('%', '%%')};dur=%.3f" for stage in stages])


@lru_cache(maxsize=1024)  # a few targets, reasons and variants make up nearly all answers
def route_text(route: Route) -> str:
    return (
        f"{route.reason}; variant={route.variant}; attempts={route.attempts}; "
        f"hedged={route.hedged:d}; fallback={route.fallback:d}; degraded={route.degraded:d}; "
        f"provisional={route.provisional:d}"
    )

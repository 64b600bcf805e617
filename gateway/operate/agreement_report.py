"""The agreement report: which devices drift and what disagreed, as JSON for commands and as metric families.

GET /v1/agreement       by source, drifting ones first: how many answers were compared, by which metric, the
                        disagreement that was recorded, the mean since the start and of late, the limit
GET /v1/disagreements   the work list, newest first (?model=NAME, ?last=N)

Without the section `agreement` both say so with status 409.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice
from typing import Any, Final

import msgspec
from aiohttp import web
from prometheus_client.metrics_core import Metric

from gateway.core.agreement.agreement_watch import AgreementWatch, AnswerSource, FollowedSource
from gateway.observe.conditions import OtherCondition
from gateway.serving.shadowing import Shadowing
from tidegate import clock
from tidegate.metrics.families import counter, gauge

MOST_SERIES: Final = 500
MOST_ROWS: Final = 1000
SHOWN: Final = 20
OFF: Final = "answers are not compared: give the gateway a section `agreement` (docs/agreement.md)"


def agreement_routes(shadowing: Shadowing | None) -> list[web.RouteDef]:
    async def agreement(_request: web.Request) -> web.Response:
        return web.json_response(agreement_json(_on(shadowing), clock.now()))

    async def disagreements(request: web.Request) -> web.Response:
        model = request.query.get("model", "")
        try:
            most = min(MOST_ROWS, max(1, int(request.query.get("last", "100"))))
        except ValueError:
            raise web.HTTPBadRequest(text="`last` must be a whole number") from None
        worklist = _on(shadowing).worklist
        found = (one for one in worklist if not model or one.model == model)
        rows = [msgspec.to_builtins(one) for one in islice(found, most)]
        return web.json_response({"disagreements": rows, "kept": len(worklist), "since_start": worklist.kept})

    return [web.get("/v1/agreement", agreement), web.get("/v1/disagreements", disagreements)]


def _on(shadowing: Shadowing | None) -> Shadowing:
    if shadowing is None:
        raise web.HTTPConflict(text=OFF)
    return shadowing


def agreement_json(shadowing: Shadowing, now: float) -> dict[str, Any]:
    watch = shadowing.watch
    shown = [*watch.drifting.items(), *reversed([one for one in watch.sources.items() if one[0] not in watch.drifting])]
    return {
        "sources": [_source(source, state, now) for source, state in shown[:MOST_ROWS]],
        "followed": len(watch.sources),
        "alarm_at": watch.alarm_at,
        "pool_s": round(shadowing.budget.spent_s, 3),
    }


def agreement_rows(shadowing: Shadowing | None, now: float) -> list[dict[str, Any]]:
    """Return the first sources for a screen: those that drift, then by model and device, so that rows keep their place.

    Args:
        shadowing: None: answers are not compared.
    """
    if shadowing is None:
        return []
    watch = shadowing.watch
    shown = nsmallest(SHOWN, watch.sources, key=lambda one: (one not in watch.drifting, one[1:], one.target))
    return [_source(source, watch.sources[source], now) for source in shown]


def _source(source: AnswerSource, state: FollowedSource, now: float) -> dict[str, Any]:
    since = state.drifting_since
    return {
        **source._asdict(),
        "metric": state.terms.metric,
        "compared": state.shadowed,
        "recorded": round(state.terms.recorded, 6),
        "mean": round(state.mean, 6),
        "recent_mean": None if state.recent_mean is None else round(state.recent_mean, 6),
        "limit": round(state.limit, 6),
        "evidence": round(
            max([state.whole.evidence, state.change.evidence, *(one.evidence for one in state.slices.values())]), 3
        ),
        "drifting_for_s": None if since is None else round(now - since, 1),
        "demoted": state.demoted,
        "why": state.evidence,
        "agreed_in_a_row": state.returning.agreed if state.returning is not None else None,
    }


def drift_conditions(watch: AgreementWatch) -> list[OtherCondition]:
    """A condition for each variant of which most devices drift: no device's fault alone."""
    return [
        OtherCondition(f"model/{model}", "agreement_lost", since, f"{model} {version} {variant}: {evidence}")
        for (model, version, variant), since, evidence in watch.common()
    ]


def agreement_families(shadowing: Shadowing) -> Iterable[Metric]:
    watch = shadowing.watch
    outcomes = [((model, outcome), float(count)) for (model, outcome), count in shadowing.outcomes.items()]
    drifting = [
        ((one.target, one.model, one.version, one.variant), 1.0 if state.demoted else 0.0)
        for one, state in list(watch.drifting.items())[:MOST_SERIES]
    ]
    labels = ("target", "model", "version", "variant")
    words = "1 where its answers drift and it is demoted, 0 where they drift and most devices' do."
    spent = shadowing.budget.spent_s
    return [
        counter("tidegate_shadow_answers", "Answers computed again, by outcome.", ("model", "outcome"), outcomes),
        counter("tidegate_shadow_pool_seconds", "Of pools, spent on shadows.", (), [((), spent)]),
        gauge("tidegate_answer_drift", words, labels, drifting),
    ]

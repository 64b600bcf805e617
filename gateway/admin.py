"""What an operator may ask a running gateway: its state, its last decisions, and whether it lives.

    GET /v1/state          targets with state and load, models with who offers them
    GET /debug/decisions   the last finished requests, newest first, with every candidate's numbers (?last=N)
    GET /healthz           200 while the process answers at all

Rendering happens here, when somebody asks; nothing is prepared per request. Read-only, on a port of its own that is
bound to loopback unless the configuration says otherwise.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from aiohttp import web

from gateway.catalog import Catalog
from gateway.conductor import Conductor, Flown
from gateway.core.fleet import Fleet, TargetView
from gateway.core.placement import Candidate, Decision, Judged, implied_chance
from gateway.core.request import Answer
from tidegate import clock
from tidegate.fleet.offers import ModelOffer


def admin_routes(fleet: Fleet, catalog: Catalog, conductor: Conductor) -> list[web.RouteDef]:
    async def state(_request: web.Request) -> web.Response:
        return web.json_response(state_of(fleet, catalog, clock.now()))

    async def decisions(request: web.Request) -> web.Response:
        try:
            last = max(1, int(request.query.get("last", "50")))
        except ValueError:
            raise web.HTTPBadRequest(text="last must be a whole number") from None
        newest_first = list(conductor.flown)[: -last - 1 : -1]
        return web.json_response({"decisions": [explained(flown) for flown in newest_first]})

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    return [web.get("/v1/state", state), web.get("/debug/decisions", decisions), web.get("/healthz", healthz)]


def state_of(fleet: Fleet, catalog: Catalog, now: float) -> dict[str, Any]:
    return {
        "targets": [_target(target, now) for target in fleet.targets.values()],
        "models": [
            _model(manifest.name, manifest.version, [one.target.id for one in offered])
            for manifest in catalog.manifests
            for offered in [fleet.offered(manifest.name, manifest.version)]
        ],
    }


def explained(flown: Flown) -> dict[str, Any]:
    """One finished request with its first decision, in milliseconds."""
    end = flown.end
    answer = (
        {
            "served_by": end.candidate.target.id,
            "variant": end.candidate.variant.name,
            "reason": end.reason,
            "attempts": end.attempts,
            "hedged": end.hedged,
            "fallback": end.fallback,
            "degraded": end.degraded,
        }
        if isinstance(end, Answer)
        else {"error": end}
    )
    asked = _asked(flown.decision) if flown.decision else {}
    return {"id": flown.request_id, **asked, "end": answer, "elapsed_ms": _ms(flown.elapsed_s)}


def _asked(decision: Decision) -> dict[str, Any]:
    ask, budget_s = decision.ask, decision.ask.deadline - decision.at
    return {
        "model": ask.model,
        "version": ask.version,
        "units": ask.units,
        "rows": ask.rows,
        "longest_row": ask.longest_row,
        "demanded": ask.variant,
        "budget_ms": _ms(budget_s),
        "reason": decision.reason,
        "chosen": decision.chosen.target.id if decision.chosen else None,
        "refusal": decision.refusal.message if decision.refusal else None,
        "candidates": [
            _candidate(candidate, budget_s) | _judged(candidate, judged, budget_s)
            for candidate, judged in zip_longest(decision.candidates, decision.judged)
        ],
    }


def _candidate(candidate: Candidate, budget_s: float) -> dict[str, Any]:
    return {
        "target": candidate.target.id,
        "variant": candidate.variant.name,
        "link_ms": _ms(candidate.link_s),
        "wait_ms": _ms(candidate.wait_s),
        "compute_ms": _ms(candidate.compute_s),
        "finish_ms": _ms(candidate.finish_s),
        "margin_ms": _ms(candidate.margin_s),
        "cost": round(candidate.cost, 9),
        "in_time": candidate.finish_s + candidate.margin_s <= budget_s,
    }


def _judged(candidate: Candidate, judged: Judged | None, budget_s: float) -> dict[str, Any]:
    """The chance that was at hand: of a candidate that nobody judged, the one that its margin stands for."""
    if judged is None:
        return {"chance": round(implied_chance(candidate, budget_s), 4)}
    return {
        "chance": round(judged.chance, 4),
        "calibrated": round(judged.claimed, 4),
        "harm": round(judged.harm, 4),
        "value": round(judged.value, 4),
    }


def _target(target: TargetView, now: float) -> dict[str, Any]:
    state, reason = target.state(now)
    load = target.ledger.load
    return {
        "id": target.id,
        "tier": target.spec.tier,
        "address": target.spec.address,
        "transport": target.spec.transport,
        "state": state,
        "reason": reason,
        "models": [_offer(offer) for offer in target.offers],
        "rtt_ms": _ms(target.link.rtt_s),
        "queued": load.queued if load else 0,
        "in_flight": target.ledger.in_flight,
        "wait_ms": _ms(target.ledger.wait_s(now)),
    }


def _offer(offer: ModelOffer) -> dict[str, Any]:
    return {
        "name": offer.name,
        "version": offer.version,
        "state": offer.state,
        "variants": [variant.name for variant in offer.variants],
    }


def _model(name: str, version: str, targets: list[str]) -> dict[str, Any]:
    return {"name": name, "version": version, "ready": bool(targets), "targets": list(dict.fromkeys(targets))}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)

"""The admin routes that only look: a running gateway's state, its conditions, and its last decisions.

    GET /v1/state          targets with state and load, models with the targets that offer them
    GET /debug/conditions  conditions by target, each with its beginning and its evidence
    GET /debug/decisions   finished requests with all their numbers, newest first: the last ones (?last=N), all of one
                           id (?id=ID, with hindsight), filtered by late, failed or hedged (?late=1 …), by model, target
                           or tenant, and the slowest (?slowest=N); at most MOST_AT_ONCE, from an offset on (?skip=N)
    GET /debug/recording   requests and links as they come, for so many seconds (?for=60): `tidegate record`
    GET /healthz           200 while the process answers at all

Answers are rendered on request; a served request prepares nothing for them. The routes are on a port of their own that
is bound to loopback unless the configuration says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from gateway.catalog import Catalog
from gateway.core.access.broker_rights import BrokerRights
from gateway.core.estimate.service_cost import VariantCost
from gateway.core.fleet.attestation import ATTESTATION_OFF
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.target import TargetView
from gateway.core.history.query import RecordFilter, select_records
from gateway.core.history.recorder import RequestRecord
from gateway.observe.conditions import OtherCondition, conditions_json
from gateway.operate.explanation import explanation_json, matching_records
from gateway.serving.dispatcher import Dispatcher
from tidegate import clock
from tidegate.fleet.offers import ModelOffer

MOST_AT_ONCE: Final = 500  # requests in one answer
MOST_OF_ONE_ID: Final = 10  # the hindsight of each walks over the whole flight recorder


def admin_routes(
    fleet: Fleet,
    catalog: Catalog,
    dispatcher: Dispatcher,
    refused: Mapping[str, str],
    broker_rights: BrokerRights,
    others: Callable[[float], list[OtherCondition]] = lambda _now: [],
) -> list[web.RouteDef]:
    """Args: others: the conditions at an instant that are of no target."""

    async def state(_request: web.Request) -> web.Response:
        now = clock.now()
        return web.json_response(state_of(fleet, catalog, now, refused, others(now), broker_rights.refusal))

    async def decisions(request: web.Request) -> web.Response:
        sought, most, skip = _sought(request.query)
        # Records never change, so a thread may read them; rendering all would hold the event loop for too long.
        memory, request_id = dispatcher.recorder, request.query.get("id")
        render = partial(
            _rendered, tuple(memory), run=memory.run, request_id=request_id, sought=sought, most=most, skip=skip
        )
        return web.Response(body=await asyncio.to_thread(render), content_type="application/json", charset="utf-8")

    async def conditions(_request: web.Request) -> web.Response:
        now = clock.now()
        return web.json_response({"conditions": conditions_json(fleet, now, others(now))})

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    return [
        web.get("/v1/state", state),
        web.get("/debug/decisions", decisions),
        web.get("/debug/conditions", conditions),
        web.get("/healthz", healthz),
    ]


def _rendered(
    memory: Sequence[RequestRecord], *, run: str, request_id: str | None, sought: RecordFilter, most: int, skip: int
) -> bytes:
    if request_id:
        newest_first = matching_records(memory, request_id, run)[: -MOST_OF_ONE_ID - 1 : -1]
        rendered = [explanation_json(record, memory, run) for record in newest_first]
    else:
        rendered = [
            explanation_json(record, run=run)
            for record in select_records(reversed(memory), sought, most, min(skip, len(memory)))
        ]
    return msgspec.json.encode({"decisions": rendered})


def _sought(query: Mapping[str, str]) -> tuple[RecordFilter, int, int]:
    """Return the filter, the most and the offset. Raises HTTPBadRequest: a number is none."""
    try:
        most = min(MOST_AT_ONCE, max(1, int(query.get("slowest", query.get("last", "50")))))
        skip = max(0, int(query.get("skip", "0")))
    except ValueError:
        raise web.HTTPBadRequest(text="`last`, `slowest` and `skip` must be whole numbers") from None
    late, failed, hedged = (query.get(name, "0") != "0" for name in ("late", "failed", "hedged"))
    model, target, tenant = (query.get(name, "") for name in ("model", "target", "tenant"))
    sought = RecordFilter(
        late=late,
        failed=failed,
        hedged=hedged,
        model=model,
        target=target,
        tenant=tenant,
        slowest="slowest" in query,
    )
    return sought, most, skip


def state_of(
    fleet: Fleet,
    catalog: Catalog,
    now: float,
    refused: Mapping[str, str],
    others: Sequence[OtherCondition] = (),
    broker_refusal: str = "",
) -> dict[str, Any]:
    return {
        "targets": [target_of(target, fleet, now) for target in fleet.targets.values()],
        "models": [
            _model(manifest.name, manifest.version, [one.target.id for one in offered])
            for manifest in catalog.manifests
            for offered in [fleet.offered(manifest.name, manifest.version)]
        ],
        "refused": [{"device": device, "reason": reason} for device, reason in sorted(refused.items())],
        "broker_refusal": broker_refusal,
        "ailing": [other.as_json(now) for other in others],
    }


def target_of(target: TargetView, fleet: Fleet, now: float) -> dict[str, Any]:
    state, reason = target.state(now)
    load = target.queue_estimate.load
    return {
        "id": target.id,
        "tier": target.spec.tier,
        "address": target.spec.address,
        "transport": target.spec.transport,
        "road": target.path_kind,
        "state": state,
        "reason": reason,
        "attestation": None if target.attestation is ATTESTATION_OFF else str(target.attestation),
        "attested": target.attestation.until >= now,
        "models": [_offer(offer, target, fleet) for offer in target.offers],
        "conditions": target.conditions.in_words(),
        "mode": target.conditions.mode,
        "kept": target.conditions.kept,
        "ails": sorted(target.degradation.active),
        "ailing": [
            {"condition": one.name, "for_s": round(now - one.since, 1), "evidence": one.evidence}
            for one in target.degradation.active.values()
        ],
        "price": round(target.price, 6),
        "rtt_ms": _ms(target.link.rtt_s),
        "jitter_ms": _ms(target.link.jitter_s),
        "queued": load.queued if load else 0,
        "in_flight": target.queue_estimate.in_flight,
        "wait_ms": _ms(target.wait_s(now)),
    }


def _offer(offer: ModelOffer, target: TargetView, fleet: Fleet) -> dict[str, Any]:
    costs = {one.variant.name: one.cost for one in fleet.offered(offer.name, offer.version) if one.target is target}
    return {
        "name": offer.name,
        "version": offer.version,
        "state": offer.state,
        "workers_lost": offer.worker.lost if offer.worker else 0,
        "sandbox": offer.sandbox,
        "variants": [variant.name for variant in offer.variants],
        "paced": any(variant.paced for variant in offer.variants),
        "costs": {name: _cost(cost) for name, cost in costs.items()},
    }


def _cost(cost: VariantCost) -> dict[str, Any]:
    """Render the warm-up measurement as (work units, milliseconds), and its correction by later answers."""
    return {
        "measured": [(units, _ms(seconds)) for units, seconds in cost.points],
        "factor": round(cost.factor, 4),
        "sigma": round(cost.sigma, 4),
    }


def _model(name: str, version: str, targets: list[str]) -> dict[str, Any]:
    return {"name": name, "version": version, "ready": bool(targets), "targets": sorted(set(targets))}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)

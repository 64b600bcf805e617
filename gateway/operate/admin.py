"""The admin routes that only look: a running gateway's state, its conditions, and its last decisions.

    GET /v1/state          targets with state and load, models with the targets that offer them
    GET /debug/conditions  conditions by target, each with its beginning and its evidence
    GET /debug/decisions   finished requests with all their numbers, newest first: the last ones (?last=N), all of one
                           id (?id=ID, with hindsight), filtered by late, failed or hedged (?late=1 …), by model, target
                           or tenant, and the slowest (?slowest=N); at most MOST_AT_ONCE, from an offset on (?skip=N);
                           those that had ended at an instant of the machine's clock (?before=SECONDS)
    GET /debug/recording   requests and links as they come, for so many seconds (?for=60): `tidegate record`
    GET /healthz           200 while the process answers at all

Answers are rendered on request; a served request prepares nothing for them. The routes are on a port of their own that
is bound to loopback unless the configuration says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web

from gateway.catalog import Catalog
from gateway.core.access.broker_rights import BrokerRights
from gateway.core.estimate.service_cost import VariantCost
from gateway.core.fleet.attestation import ATTESTATION_OFF
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.found_targets import FoundTargets
from gateway.core.fleet.target import TargetView
from gateway.core.history.query import RecordFilter, select_records
from gateway.core.history.recorder import FlightRecorder, RequestRecord
from gateway.core.peers.peers import Peers
from gateway.observe.conditions import OtherCondition, conditions_json
from gateway.operate.configuration_report import configuration_json
from gateway.operate.explanation import explanation_json, matching_records
from gateway.operate.sources import source_of, sources_json
from gateway.serving.dispatcher import Dispatcher
from tidegate import clock
from tidegate.fleet.offers import ModelOffer

MOST_AT_ONCE: Final = 500  # requests in one answer
MOST_OF_ONE_ID: Final = 10  # the hindsight of each walks over the whole flight recorder


class AllProcesses(Protocol):
    """The other processes of a gateway that has several, as its operators' port needs them."""

    @property
    def by_target(self) -> Mapping[str, int]:
        """Their requests in flight by target."""
        ...

    def members(self) -> list[dict[str, Any]]:
        """Each process, this one too."""
        ...

    async def decisions(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """What they remember of requests, with the instant of each."""
        ...


def admin_routes(
    fleet: Fleet,
    catalog: Catalog,
    dispatcher: Dispatcher,
    refused: Mapping[str, str],
    broker_rights: BrokerRights,
    others: Callable[[float], list[OtherCondition]] = lambda _now: [],
    found: FoundTargets | None = None,
    peers: Peers | None = None,
    processes: AllProcesses | None = None,
    cached: Callable[[], list[dict[str, Any]]] = list,
    configured: Callable[[float], dict[str, Any]] = lambda _now: configuration_json(None, 0.0),
    helped: Callable[[], list[dict[str, Any]]] = list,
) -> list[web.RouteDef]:
    """
    Args:
        others: the conditions at an instant that are of no target.
        found: what the sources of discovery say.
        peers: the gateways beside this one.
        processes: of a gateway with `workers`; None: this is all.
        cached: by model, what is answered from the response cache.
        configured: how devices' settings are to those that are desired.
        helped: by device, the requests that it asks for now.
    """

    async def state(_request: web.Request) -> web.Response:
        now = clock.now()
        refusal = broker_rights.refusal
        told = state_of(fleet, catalog, now, refused, others(now), refusal, found=found)
        workers = [] if processes is None else _counted_with(processes, told["targets"])
        beside = {"gateways": peers_json(peers, now), "workers": workers, "cache": cached(), "help": helped()}
        return web.json_response({**told, **beside, "configuration": configured(now)})

    async def conditions(_request: web.Request) -> web.Response:
        now = clock.now()
        return web.json_response({"conditions": conditions_json(fleet, now, others(now))})

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    return [
        web.get("/v1/state", state),
        web.get("/debug/decisions", _decisions_of(dispatcher.recorder, processes)),
        web.get("/debug/conditions", conditions),
        web.get("/healthz", healthz),
    ]


def _counted_with(processes: AllProcesses, targets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each process, and add what the others have in flight to the targets."""
    elsewhere = processes.by_target
    for target in targets:
        target["in_flight"] += elsewhere.get(target["id"], 0)
    return processes.members()


def _decisions_of(
    memory: FlightRecorder, processes: AllProcesses | None
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The route of the last decisions: of this process, or of all of them in one order."""

    async def decisions(request: web.Request) -> web.Response:
        sought, most, skip = _sought(request.query)
        dated = "dated" in request.query or processes is not None
        here, most_here = (skip, most) if processes is None else (0, min(MOST_AT_ONCE, most + skip))
        # Records never change, so a thread may read them; rendering all would hold the event loop for too long.
        render = partial(
            _rendered,
            tuple(memory),
            run=memory.run,
            request_id=request.query.get("id"),
            sought=sought,
            most=most_here,
            skip=here,
            dated=dated,
        )
        found = await asyncio.to_thread(render)
        if processes is not None:
            asked = {**request.query, "slowest" if sought.slowest else "last": str(most_here), "skip": "0"}
            found = _merged([*found, *await processes.decisions(asked)], slowest=sought.slowest)[skip : skip + most]
        body = msgspec.json.encode({"decisions": found})
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    return decisions


def _rendered(
    memory: Sequence[RequestRecord],
    *,
    run: str,
    request_id: str | None,
    sought: RecordFilter,
    most: int,
    skip: int,
    dated: bool,
) -> list[dict[str, Any]]:
    if request_id:
        newest_first = matching_records(memory, request_id, run)[: -MOST_OF_ONE_ID - 1 : -1]
        pairs = [(record, explanation_json(record, memory, run)) for record in newest_first]
    else:
        newest_first = select_records(reversed(memory), sought, most, min(skip, len(memory)))
        pairs = [(record, explanation_json(record, run=run)) for record in newest_first]
    if not dated:
        return [one for _, one in pairs]
    # The machine's clock, which all processes of a gateway read.
    return [{**one, "at": record.arrived_at + record.elapsed_s} for record, one in pairs]


def _merged(decisions: list[dict[str, Any]], *, slowest: bool) -> list[dict[str, Any]]:
    """Those of several processes in one order: the slowest first, or the newest."""
    key = "elapsed_ms" if slowest else "at"
    return sorted(decisions, key=lambda one: -float(one[key]))


def _sought(query: Mapping[str, str]) -> tuple[RecordFilter, int, int]:
    """Return the filter, the most and the offset. Raises HTTPBadRequest: a number is none."""
    try:
        most = min(MOST_AT_ONCE, max(1, int(query.get("slowest", query.get("last", "50")))))
        skip = max(0, int(query.get("skip", "0")))
    except ValueError:
        raise web.HTTPBadRequest(text="`last`, `slowest` and `skip` must be whole numbers") from None
    try:
        before = float(query.get("before", "inf"))
    except ValueError:
        raise web.HTTPBadRequest(text="`before` must be seconds of the machine's clock") from None
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
        before=before,
    )
    return sought, most, skip


def state_of(
    fleet: Fleet,
    catalog: Catalog,
    now: float,
    refused: Mapping[str, str],
    others: Sequence[OtherCondition] = (),
    broker_refusal: str = "",
    *,
    found: FoundTargets | None = None,
) -> dict[str, Any]:
    found = found or FoundTargets()
    return {
        "targets": [
            {**target_of(target, fleet, now), "source": source_of(found, target.id)}
            for target in fleet.targets.values()
        ],
        "sources": sources_json(found, now),
        "models": [
            _model(manifest.name, manifest.version, [one.target.id for one in offered])
            for manifest in catalog.manifests
            for offered in [fleet.offered(manifest.name, manifest.version)]
        ],
        "refused": [{"device": device, "reason": reason} for device, reason in sorted(refused.items())],
        "broker_refusal": broker_refusal,
        "ailing": [other.as_json(now) for other in others],
    }


def peers_json(peers: Peers | None, now: float) -> dict[str, Any]:
    """How many gateways share the fleet, this one included, and when each of the others last said what it is asked.

    `has_namesake`: another live gateway has this one's name.
    """
    if peers is None:
        return {"count": 1, "others": [], "has_namesake": False}
    others = [
        {"name": name, "said_s_ago": None if ago_s is None else round(ago_s, 1)} for name, ago_s in peers.seen(now)
    ]
    return {"count": peers.count(now), "others": others, "has_namesake": peers.has_namesake(now)}


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
        "grades": {variant.name: variant.grade for variant in offer.variants if variant.slots},
        "upstream": offer.upstream,
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

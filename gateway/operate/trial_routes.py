"""The trial routes let operators split a model's requests between two versions, over the admin port and its guard.

GET    /v1/versions                every model: its versions with the targets that serve each, the default version,
                                   and the trial with both versions' figures beside each other
PUT    /v1/versions/MODEL/trial    `{"candidate": "2", "share": 0.05, "tenants": ["acme"], "compare": 0.1}`: begins or
                                   changes a trial; `standing` is the present default version unless it is given
POST   /v1/versions/MODEL/promote  the candidate becomes the default version
POST   /v1/versions/MODEL/return   the trial ends; the standing version answers alone

409: nothing is on trial. 422: the split is not possible, and the text says why.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from gateway.catalog import Catalog
from gateway.core.fleet.fleet import Fleet
from gateway.core.versions.traffic_split import InvalidSplit, TrafficSplit
from gateway.core.versions.version_shares import shares_by_version
from gateway.delivery.trials import Trials
from gateway.layers.versions import standing
from gateway.operate.trial_report import trial_report
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.outcome import ModelNotFound

_MAX_BODY_BYTES: Final = 1 << 18


class SplitRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `PUT /v1/versions/MODEL/trial`."""

    candidate: str
    standing: str = ""
    share: float = 0.0
    tenants: tuple[str, ...] = ()
    compare: float = 0.0


def trial_routes(trials: Trials, catalog: Catalog, fleet: Fleet) -> list[web.RouteDef]:
    async def every(_request: web.Request) -> web.Response:
        names = dict.fromkeys(manifest.name for manifest in catalog.manifests)
        return web.json_response({"models": [model_versions(trials, catalog, fleet, name) for name in names]})

    async def begin(request: web.Request) -> web.Response:
        model, raw = request.match_info["model"], await request.content.read(_MAX_BODY_BYTES)
        try:
            wanted = msgspec.json.decode(raw, type=SplitRequest)
            default = wanted.standing or _default_version(trials, catalog, model)
            await trials.begin(
                model, TrafficSplit(default, wanted.candidate, wanted.share, wanted.tenants, wanted.compare)
            )
        except (msgspec.MsgspecError, InvalidSplit, ModelNotFound) as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error
        return web.json_response(model_versions(trials, catalog, fleet, model))

    def end(step: Callable[[str], Awaitable[None]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def ended(request: web.Request) -> web.Response:
            model = request.match_info["model"]
            try:
                await step(model)
            except InvalidSplit as error:
                raise web.HTTPConflict(text=str(error)) from error
            return web.json_response(model_versions(trials, catalog, fleet, model))

        return ended

    return [
        web.get("/v1/versions", every),
        web.put("/v1/versions/{model}/trial", begin),
        web.post("/v1/versions/{model}/promote", end(trials.promote)),
        web.post("/v1/versions/{model}/return", end(trials.call_back)),
    ]


def model_versions(trials: Trials, catalog: Catalog, fleet: Fleet, model: str) -> dict[str, Any]:
    now, split = clock.now(), trials.splits.split.get(model)
    manifests = [one for one in catalog.manifests if one.name == model]
    stand = {one.version: standing(fleet, model, one.version, now) for one in manifests}
    siblings = () if split or model in trials.splits.promoted else catalog.siblings(model)
    shared = shares_by_version({version: stand[version] for version in siblings})
    found: dict[str, Any] = {
        "name": model,
        "meant": _default_version(trials, catalog, model),
        "versions": [
            {
                "version": one.version,
                **stand[one.version]._asdict(),
                "quality": _quality(one),
                "share": round(shared[one.version], 4) if one.version in shared else None,
            }
            for one in manifests
        ],
        "trial": trial_report(trials, model) if split is not None else None,
    }
    return found


def _default_version(trials: Trials, catalog: Catalog, model: str) -> str:
    """Return the version for a request that names none. Raises ModelNotFound."""
    split = trials.splits.split.get(model)
    if split is not None:
        return split.standing
    return trials.splits.promoted.get(model) or catalog.manifest(model).version


def _quality(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return the quality by variant, as measured against the reference when the model was built."""
    measured = [(one.name, one.quality) for one in manifest.variants if one.quality is not None]
    return {name: {"metric": quality.metric, "value": quality.value} for name, quality in measured}

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

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec
from aiohttp import web

from gateway.core.versions.traffic_split import InvalidSplit
from gateway.delivery.trials import SplitRequest, Trials
from gateway.delivery.uninterrupted import uninterrupted
from gateway.operate.trial_report import trial_report
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.outcome import ModelNotFound

_MAX_BODY_BYTES: Final = 1 << 18


def trial_routes(trials: Trials) -> list[web.RouteDef]:
    async def every(_request: web.Request) -> web.Response:
        names = dict.fromkeys(manifest.name for manifest in trials.defaults.catalog.manifests)
        return web.json_response({"models": [model_versions(trials, name) for name in names]})

    async def begin(request: web.Request) -> web.Response:
        model, raw = request.match_info["model"], await request.read()
        if len(raw) > _MAX_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(_MAX_BODY_BYTES, len(raw))
        try:
            await uninterrupted(trials.begin(model, msgspec.json.decode(raw, type=SplitRequest)))
        except (msgspec.MsgspecError, UnicodeDecodeError, InvalidSplit, ModelNotFound) as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error
        return web.json_response(model_versions(trials, model))

    def end(step: Callable[[str], Coroutine[Any, Any, None]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def ended(request: web.Request) -> web.Response:
            model = request.match_info["model"]
            try:
                await uninterrupted(step(model))
            except InvalidSplit as error:
                raise web.HTTPConflict(text=str(error)) from error
            return web.json_response(model_versions(trials, model))

        return ended

    return [
        web.get("/v1/versions", every),
        web.put("/v1/versions/{model}/trial", begin),
        web.post("/v1/versions/{model}/promote", end(trials.promote)),
        web.post("/v1/versions/{model}/return", end(trials.call_back)),
    ]


def model_versions(trials: Trials, model: str) -> dict[str, Any]:
    now, defaults, splits = clock.now(), trials.defaults, trials.splits
    manifests = [one for one in defaults.catalog.manifests if one.name == model]
    stand = defaults.count(model, tuple(one.version for one in manifests), now)
    line = None if model in splits.split else defaults.line(model)
    shares: dict[str, float] = {}
    if line is not None and len(line.sharing) > 1:
        shares = dict.fromkeys(line.names, 0.0) | defaults.shares(model, now)
    return {
        "name": model,
        "meant": defaults.default(model, now) if manifests else "",
        "preferred": splits.promoted.get(model),
        "ready": bool(manifests) and defaults.ready(model, now),
        "versions": [
            {
                "version": one.version,
                **stand[one.version]._asdict(),
                "quality": _quality(one),
                "share": round(shares[one.version], 4) if one.version in shares else None,
            }
            for one in manifests
        ],
        "trial": trial_report(trials, model) if model in splits.split else None,
    }


def _quality(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return the quality by variant, as measured against the reference when the model was built."""
    measured = [(one.name, one.quality) for one in manifest.variants if one.quality is not None]
    return {name: {"metric": quality.metric, "value": quality.value} for name, quality in measured}

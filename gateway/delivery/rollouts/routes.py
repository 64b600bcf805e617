"""The rollout routes let operators start, watch and steer rollouts, over the admin port and its guard.

GET  /v1/rollouts                  a summary of every rollout, oldest first
GET  /v1/rollouts/ID               one rollout, with each device's step and report, and its history
POST /v1/rollouts                  an order (`order.py`): 201, 409 the present state forbids it, 422 it is invalid, 503
                                   it cannot be recorded, and does not begin
POST /v1/rollouts/ID/{pause,resume,abort}     `{"why": "…", "leave_none": false}`; abort returns devices also after
                                   success, but only with `leave_none` if no target would serve the model then; 503 it
                                   is not recorded yet, so another gateway or a restart would not know of it
GET  /v1/devices                   what an order is made from: devices with revisions, documents and reports
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web

from gateway.core.versions.canary import CanaryRollout, DeviceProgress, DeviceStep
from gateway.delivery.rollouts.coordinator import DeviceChannel, NotRecorded, RolloutConflict, RolloutController
from gateway.delivery.rollouts.order import InvalidOrder, decode_order
from gateway.fleet_sync.freshness import DeviceView
from tidegate import clock

VERBS: Final = ("pause", "resume", "abort")
_MAX_WHY: Final = 300


class SteeringRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a command to a rollout."""

    why: str = ""
    leave_none: bool = False

    @property
    def words(self) -> str:
        return f"operator: {self.why[:_MAX_WHY]}" if self.why else "operator"


def rollout_routes(
    rollouts: RolloutController, channel: DeviceChannel, base_urls: tuple[str, ...]
) -> list[web.RouteDef]:
    """Return the routes.

    Args:
        base_urls: where devices fetch artefacts, for the documents.
    """

    async def every(_request: web.Request) -> web.Response:
        conductor = {} if rollouts.lease is None else {"conductor": rollouts.lease.conductor}
        summaries = [rollout_summary(waves) for waves in rollouts.all.values()]
        return web.json_response({"rollouts": summaries, **conductor})

    async def one(request: web.Request) -> web.Response:
        waves = rollouts.all.get(request.match_info["id"])
        if waves is None:
            raise web.HTTPNotFound(text=f"there is no rollout {request.match_info['id'][:80]!r}")
        return web.json_response(rollout_detail(waves))

    async def begin(request: web.Request) -> web.Response:
        try:
            order = decode_order(await request.read())
            await rollouts.begin(order)
        except NotRecorded as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        except RolloutConflict as error:
            raise web.HTTPConflict(text=str(error)) from error
        except InvalidOrder as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error
        return web.json_response(rollout_detail(rollouts.all[order.spec.id]), status=201)

    async def steer(request: web.Request) -> web.Response:
        verb = request.match_info["verb"]
        if verb not in VERBS:
            raise web.HTTPNotFound(text=f"a rollout can {', '.join(VERBS)}")
        try:
            steering = await _steering(request)
            id, leave_none = request.match_info["id"], steering.leave_none
            waves = await rollouts.command(id, verb, steering.words, leave_none=leave_none)
        except NotRecorded as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        except RolloutConflict as error:
            raise web.HTTPConflict(text=str(error)) from error
        return web.json_response(rollout_detail(waves))

    async def devices(_request: web.Request) -> web.Response:
        views = channel.devices(clock.now())
        return web.json_response({"urls": base_urls, "devices": [_device(rollouts, view) for view in views]})

    return [
        web.get("/v1/rollouts", every),
        web.get("/v1/rollouts/{id}", one),
        web.post("/v1/rollouts", begin),
        web.post("/v1/rollouts/{id}/{verb}", steer),
        web.get("/v1/devices", devices),
    ]


def rollout_summary(waves: CanaryRollout) -> dict[str, Any]:
    spec, state = waves.spec, waves.state
    return {
        "id": spec.id,
        "kind": spec.kind,
        "model": spec.model,
        "version": spec.version,
        "phase": str(state.phase),
        "reason": state.reason,
        "wave": state.wave + 1,
        "waves": list(spec.waves),
        "sizes": list(spec.sizes),
        "success_ratio": spec.success_ratio,
        "max_errors": spec.max_errors,
        "deadline_s": spec.deadline_s,
        "elapsed_s": round(state.elapsed_s, 1),
        "counts": {str(step): waves.count(step) for step in DeviceStep},
    }


def rollout_detail(waves: CanaryRollout) -> dict[str, Any]:
    return {
        **rollout_summary(waves),
        "devices": {device: _part(waves, device, part) for device, part in waves.state.parts.items()},
        "notes": [{"at_s": note.at_s, "words": note.words} for note in waves.state.notes],
    }


def _part(waves: CanaryRollout, device: str, part: DeviceProgress) -> dict[str, Any]:
    revisions = waves.spec.revisions[device]
    asked = waves.asks.get(device)
    desired = None if asked is None else revisions.back if asked else revisions.forward
    return {**msgspec.to_builtins(part), "desired_revision": desired}


def _device(rollouts: RolloutController, view: DeviceView) -> dict[str, Any]:
    held = rollouts.document(view.name)
    configuration = rollouts.configured(view)
    return {
        "name": view.name,
        "freshness": str(view.freshness),
        "agent": view.agent,
        "revision": rollouts.newest_revision(view),
        "document": None if held is None else held[1].decode(errors="replace"),
        "reported": msgspec.to_builtins(view.reported),
        "configuration": None
        if configuration is None
        else {"state": str(configuration.state), "evidence": configuration.evidence},
        "offers": [{"name": one.name, "version": one.version, "state": one.state} for one in view.offers],
    }


async def _steering(request: web.Request) -> SteeringRequest:
    try:
        return msgspec.json.decode(await request.read(), type=SteeringRequest)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise web.HTTPBadRequest(text=f'the body is `{{"why": "…"}}`: {error}') from error

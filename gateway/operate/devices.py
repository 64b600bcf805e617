"""What the fleet's register knows of every device, for operators: also of those that are no target.

    GET /v1/fleet            how many by freshness, and how old what is known of the live ones is
    GET /v1/fleet?all=1      the same, and each device: name, epoch, freshness with its reason, age

`/v1/state` tells of targets: devices that were dialled. This tells of whoever speaks over MQTT, so it also shows whom
the gateway may not dial, and it stays short for ten thousand of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from aiohttp import web

from gateway.fleet_sync.freshness import DeviceView
from tidegate.estimate.quantiles import nearest_rank

QUANTILES: Final = (0.5, 0.9, 0.99, 1.0)


def device_routes(devices: Callable[[], Sequence[DeviceView]]) -> list[web.RouteDef]:
    async def listed(request: web.Request) -> web.Response:
        views = devices()
        told = summary_of(views)
        if request.query.get("all") == "1":
            told["devices"] = [_device(view) for view in views]
        return web.json_response(told)

    return [web.get("/v1/fleet", listed)]


def summary_of(views: Sequence[DeviceView]) -> dict[str, Any]:
    ages = sorted(view.age_s for view in views if view.freshness.is_usable)
    return {
        "known": len(views),
        "freshness": dict(Counter(view.freshness.value for view in views)),
        "age_s": {f"p{100 * share:g}": round(nearest_rank(ages, share), 4) for share in QUANTILES} if ages else {},
    }


def _device(view: DeviceView) -> dict[str, Any]:
    return {
        "name": view.name,
        "epoch": view.epoch,
        "freshness": view.freshness.value,
        "reason": view.reason,
        "age_s": round(view.age_s, 4),
        "addresses": list(view.urls),
        "agent": view.agent,
        "accepting": view.accepting,
    }

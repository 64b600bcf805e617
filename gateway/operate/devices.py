"""The device routes show operators every device of the fleet registry, also devices that are no target.

    GET /v1/fleet            counts by freshness, and the age of the live devices' last reports
    GET /v1/fleet?all=1      the same, and each device: name, epoch, freshness with its reason, age

`/v1/state` covers targets: devices that were dialled. This covers every device that reports over MQTT, so it also
shows devices that the gateway may not dial, and it stays short for ten thousand of them.
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
        summary = summary_of(views)
        if request.query.get("all") == "1":
            summary["devices"] = [_device(view) for view in views]
        return web.json_response(summary)

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

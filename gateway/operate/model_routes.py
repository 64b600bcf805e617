"""The routes of the admin port by which operators list, load and unload a gateway's models.

The port's middlewares have checked the right to change by then, and audit it.
"""

from __future__ import annotations

from aiohttp import web

from tidegate.oip.host import ModelHost
from tidegate.oip.http.responses import error_response, json_response
from tidegate.oip.metadata import repository_index
from tidegate.oip.repository.model_control import ModelControl
from tidegate.outcome import ServeError
from tidegate.servers.model_control_access import IndexedControl


def model_routes(host: ModelHost, control: IndexedControl) -> list[web.RouteDef]:
    async def index(_: web.Request) -> web.Response:
        return json_response(repository_index(host, await control.statuses()))

    async def load(request: web.Request) -> web.Response:
        return await _changed(request, control, load=True)

    async def unload(request: web.Request) -> web.Response:
        return await _changed(request, control, load=False)

    return [
        web.get("/v2/repository/index", index),
        web.post("/v2/repository/models/{model}/load", load),
        web.post("/v2/repository/models/{model}/unload", unload),
    ]


async def _changed(request: web.Request, control: ModelControl, *, load: bool) -> web.Response:
    name = request.match_info["model"]
    try:
        await (control.load(name) if load else control.unload(name))
    except ServeError as error:
        return error_response(error)
    return json_response({"name": name, "state": "READY" if load else "UNAVAILABLE"})

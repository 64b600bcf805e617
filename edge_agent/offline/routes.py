"""The device routes answer HTTP requests beside inference: the state of a ticket, and the state of the device.

    GET     /v2/tickets/TICKET   202 while it is open, the answer as JSON when there is one, else why there is none
    DELETE  /v2/tickets/TICKET   the caller gives the ticket up
    GET     /v1/state            mode, models and store, for people and scripts

A ticket is 128 random bits and is the only credential: its holder made the request, or got it from the caller that did.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web

from edge_agent.offline.local_host import LOOK_AGAIN_S
from edge_agent.offline.queue_db import Ticket
from edge_agent.offline.store import OfflineStore
from tidegate.oip.grpc.codec import response_from_bytes
from tidegate.oip.http.codec import BinaryOutputs, encode_response
from tidegate.oip.http.responses import JSON_TYPE, json_response
from tidegate.oip.reply import ATTESTED_KEY, BUDGET_LEFT_KEY, ROUTE_KEY, SERVED_BY_KEY, TIMING_KEY
from tidegate.oip.status import TICKET_KEY
from tidegate.outcome import NothingAlive, error_from_code
from tidegate.storage.database import DatabaseUnavailable

T = TypeVar("T")
State = Callable[[], Awaitable[dict[str, Any]]]
_is_ticket = re.compile("[0-9a-f]{32}").fullmatch
_SAID = (SERVED_BY_KEY, ROUTE_KEY, ATTESTED_KEY, BUDGET_LEFT_KEY, TIMING_KEY)


def device_routes(store: OfflineStore | None, state: State) -> list[web.RouteDef]:
    async def ticket(request: web.Request) -> web.Response:
        return _ticket_json(await _find_ticket(store, request))

    async def forget(request: web.Request) -> web.Response:
        found = await _find_ticket(store, request)
        assert store is not None
        await _available(store.forget(found.id))
        return json_response({"ticket": found.id, "state": "forgotten"})

    async def tell(_request: web.Request) -> web.Response:
        return json_response(await state())

    return [
        web.get("/v1/state", tell),
        web.get("/v2/tickets/{ticket}", ticket),
        web.delete("/v2/tickets/{ticket}", forget),
    ]


async def _find_ticket(store: OfflineStore | None, request: web.Request) -> Ticket:
    id = request.match_info["ticket"]
    found = await _available(store.ticket(id)) if store is not None and _is_ticket(id) else None
    if found is None:
        raise web.HTTPNotFound(reason="there is no such ticket, or no longer")
    return found


async def _available(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except DatabaseUnavailable as error:
        raise NothingAlive(str(error), retry_after_s=LOOK_AGAIN_S) from error


def _ticket_json(found: Ticket) -> web.Response:
    if found.state == "failed":
        raise error_from_code(found.code, f"ticket {found.id}: {found.why}")
    if found.state != "done":
        headers = {"retry-after": str(round(LOOK_AGAIN_S)), TICKET_KEY: found.id}
        return json_response({"ticket": found.id, "state": found.state}, status=202, headers=headers)
    response = response_from_bytes(found.answer)
    encoded = encode_response(response, BinaryOutputs(), {TICKET_KEY: found.id})
    said = {name: str(response.parameters[name]) for name in _SAID if name in response.parameters}
    return web.Response(body=encoded.body, headers={"Content-Type": JSON_TYPE, TICKET_KEY: found.id, **said})

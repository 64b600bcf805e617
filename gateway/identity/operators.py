"""The operators' listeners: who may look, and a line of the audit about each who did.

Elsewhere than on loopback one right is asked for on every route but `/healthz`; on loopback nothing is, and whoever
looks is noted as local.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.identity.audit import Audit
from gateway.identity.guard import GatewayGuard
from tidegate.identity import Right
from tidegate.oip.http_guard import shown_over_http

PROTOCOL: Final = "admin-http"
OPEN: Final = frozenset({"/healthz"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def only_with(right: Right, guard: GatewayGuard, audit: Audit) -> Middleware:
    """Errors are left to `error_middleware`, which stands around this one."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN:
            return await handler(request)
        identity = await guard.with_right(shown_over_http(request, PROTOCOL), right)
        if right != "admin":
            return await handler(request)
        return await _noted(request, handler, lambda status: audit.admin(identity.id, *_asked(request), status))

    return middleware


def on_loopback(audit: Audit) -> Middleware:
    """Notes who looked where nobody is asked for a credential."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN:
            return await handler(request)
        return await _noted(request, handler, lambda status: audit.local(*_asked(request), status))

    return middleware


async def _noted(request: web.Request, handler: Handler, note: Callable[[int], None]) -> web.StreamResponse:
    """Also what was asked for wrongly, and what ended in a defect, was asked for."""
    try:
        answer = await handler(request)
    except web.HTTPException as error:
        note(error.status)
        raise
    except Exception:
        note(500)
        raise
    note(answer.status)
    return answer


def _asked(request: web.Request) -> tuple[str, str, str]:
    return request.method, request.path[:200], request.remote or ""

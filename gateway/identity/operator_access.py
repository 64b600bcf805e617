"""The operators' listeners: who may look, and a line of the audit about each who did.

Elsewhere than on loopback one right is asked for on every route but the open ones; on loopback nothing is, and whoever
looks is noted as local. Who hangs up is noted as well (status 499): a stream ends in no other way.

A browser carries what other sites make it ask for to any port that it can reach, loopback too. So whatever says that it
comes from another site is refused (`own_site`), and so is a host's *name* where no credential is asked for: a domain of
a stranger's may resolve to 127.0.0.1 the second time it is asked (DNS rebinding). Addresses and `localhost` cannot.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Collection
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.identity.audit import Audit
from gateway.identity.guard import GatewayGuard
from tidegate.caller import Right
from tidegate.oip.http.guard import credentials_over_http

PROTOCOL: Final = "admin-http"
OPEN: Final = frozenset({"/healthz"})
_HUNG_UP: Final = 499

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def same_site_only(*, by_name: bool) -> Middleware:
    """Refuses what other web sites have a browser ask for. `by_name`: whether a host's name may be asked for."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text=f"this port answers no other site, and {origin[:200]!r} is one\n")
        if not by_name and not _is_address(request.host):
            raise web.HTTPForbidden(
                text="without credentials this port is asked for by address or as localhost, not by a name; "
                "for names set `auth` and `admin_host`\n"
            )
        return await handler(request)

    return middleware


def _is_address(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def right_required(right: Right, guard: GatewayGuard, audit: Audit, opened: Collection[str] = OPEN) -> Middleware:
    """Errors are left to `error_middleware`, which stands around this one."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in opened:
            return await handler(request)
        identity = await guard.with_right(credentials_over_http(request, PROTOCOL), right)
        if right != "admin":
            return await handler(request)
        return await _audited(request, handler, lambda status: audit.admin(identity.id, *_asked(request), status))

    return middleware


def loopback_audit(audit: Audit, opened: Collection[str] = OPEN) -> Middleware:
    """Notes who looked where nobody is asked for a credential."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in opened:
            return await handler(request)
        return await _audited(request, handler, lambda status: audit.local(*_asked(request), status))

    return middleware


async def _audited(request: web.Request, handler: Handler, note: Callable[[int], None]) -> web.StreamResponse:
    """Also what was asked for wrongly, and what ended in a defect, was asked for."""
    try:
        answer = await handler(request)
    except web.HTTPException as error:
        note(error.status)
        raise
    except asyncio.CancelledError:
        note(_HUNG_UP)
        raise
    except Exception:
        note(500)
        raise
    note(answer.status)
    return answer


def _asked(request: web.Request) -> tuple[str, str, str]:
    return request.method, request.path[:200], request.remote or ""

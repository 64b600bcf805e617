"""Middlewares of the operators' listeners: the required right, the audit of each request, and same-site checks.

Beyond loopback each route but the open ones requires one right, for as long as its answer takes: a stream ends with its
credential. On loopback only what changes something (all but GET and HEAD) requires a credential: one with the right
`admin` if `auth` is configured, else the operator's token (`tidegate/servers/operator_token.py`). Looks require none
there, since every account of the machine may look; if `auth` is configured, each is still audited, as "local". A closed
connection is audited as well (status 499): a stream ends in no other way.

Pages of foreign web sites are refused at every port (`tidegate/servers/foreign_sites.py`). Without credentials so is a
host *name* in `Host`, whoever sends it (`addresses_only`): a foreign domain may resolve to 127.0.0.1 the second time it
is looked up. Addresses and `localhost` cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware
from structlog import get_logger

from gateway.identity.audit import LOCAL, Audit
from gateway.identity.guard import GatewayGuard
from tidegate.caller import Right
from tidegate.oip.http.guard import credentials_over_http
from tidegate.oip.http.responses import error_response
from tidegate.oip.http.server import error_middleware
from tidegate.outcome import ServeError, Unauthenticated
from tidegate.servers.foreign_sites import is_address
from tidegate.servers.operator_token import FILE_VARIABLE, OperatorToken

PROTOCOL: Final = "admin-http"
OPEN: Final = frozenset({"/healthz"})
LOOKS: Final = frozenset({"GET", "HEAD"})
OPERATOR: Final = "operator-token"
CALLER: Final = web.RequestKey("caller", str)
_CLIENT_CLOSED: Final = 499
log = get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def addresses_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests that call the port by a name."""
    if not is_address(request.host):
        raise web.HTTPForbidden(
            text="without credentials this port is asked for by address or as localhost, not by a name; "
            "for names set `auth` and `admin_host`\n"
        )
    return await handler(request)


def right_required(right: Right, guard: GatewayGuard, audit: Audit, opened: Collection[str] = OPEN) -> Middleware:
    """Return a middleware that requires a right; `error_middleware` outside it turns its errors into answers."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in opened:
            return await handler(request)
        presented = credentials_over_http(request, PROTOCOL)
        identity = await guard.with_right(presented, right)
        request[CALLER] = identity.id
        with guard.follow(presented, right) as lapse:
            hang_up_at(lapse, request)
            if right != "admin":
                return await handler(request)
            return await _audited(
                request, handler, lambda status: audit.admin(identity.id, *_described(request), status)
            )

    return middleware


def loopback_audit(audit: Audit, opened: Collection[str] = OPEN) -> Middleware:
    """Return a middleware that audits requests for which no credential is required."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in opened:
            return await handler(request)
        return await _audited(request, handler, lambda status: audit.local(*_described(request), status))

    return middleware


def right_for_changes(guard: GatewayGuard, audit: Audit, opened: Collection[str] = OPEN) -> Middleware:
    """Return a middleware that requires the right `admin` for changes, and audits looks."""
    looked, changed = loopback_audit(audit, opened), right_required("admin", guard, audit, ())

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in LOOKS:
            return await looked(request, handler)
        return await error_middleware(request, lambda asked: changed(asked, handler))

    return middleware


def token_for_changes(token: OperatorToken, audit: Audit) -> Middleware:
    """Return a middleware that requires the operator's token for changes, and audits them."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in LOOKS:
            return await handler(request)
        presented = credentials_over_http(request, PROTOCOL)
        if not token.admits(presented.authorization):
            audit.refused("no operator token", LOCAL, presented)
            return error_response(Unauthenticated(_way_in(token)))
        request[CALLER] = OPERATOR
        return await _audited(request, handler, lambda status: audit.admin(OPERATOR, *_described(request), status))

    return middleware


def caller_of(request: web.Request) -> str:
    """Return the public id of the credential that let the request in; "" if none was required."""
    caller: str = request.get(CALLER, "")
    return caller


def _way_in(token: OperatorToken) -> str:
    if token.path is None:
        return (
            "changes need the operator's token, and this gateway could write its file nowhere: "
            "set `admin_token_file`, or `auth`"
        )
    return (
        f"changes need the operator's token in {token.path}, which the gateway's account and root can read: run the "
        f"command as one of them, put a copy's path into {FILE_VARIABLE}, or send `Authorization: Bearer TOKEN`"
    )


def hang_up_at(lapse: asyncio.Future[ServeError], request: web.Request) -> None:
    """Cut the request's connection once its credential has lapsed: in the middle of an answer there is no status."""

    def hang_up(ended: asyncio.Future[ServeError]) -> None:
        if not ended.cancelled() and request.transport is not None:
            log.info("a stream was cut: its credential has lapsed", path=request.path[:200], reason=str(ended.result()))
            request.transport.abort()  # a reader that takes nothing would hold up a close

    lapse.add_done_callback(hang_up)


async def _audited(request: web.Request, handler: Handler, note: Callable[[int], None]) -> web.StreamResponse:
    """Run the handler and audit its status, also if it refuses the request, fails, or is cancelled."""
    try:
        answer = await handler(request)
    except web.HTTPException as error:
        note(error.status)
        raise
    except asyncio.CancelledError:
        note(_CLIENT_CLOSED)
        raise
    except Exception:
        note(500)
        raise
    note(answer.status)
    return answer


def _described(request: web.Request) -> tuple[str, str, str]:
    return request.method, request.path[:200], request.remote or ""

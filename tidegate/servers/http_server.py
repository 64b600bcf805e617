"""An HTTP port over aiohttp. A caller that hangs up cancels its request, all the way down to the queue it waits in."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from tidegate import clock
from tidegate.security.certificate_expiry import peer_expiry_utc_s
from tidegate.security.certificate_identity import NotAllowed, alternative_names, check_role
from tidegate.servers.address import cannot_listen, format_address
from tidegate.servers.connection_limits import ConnectionTable
from tidegate.servers.foreign_sites import Entrance as Entrance
from tidegate.servers.foreign_sites import SitePolicy
from tidegate.servers.handed_sockets import HandedSockets
from tidegate.servers.http_connection import HttpConnection
from tidegate.servers.http_drain import HttpDrain
from tidegate.servers.limits import DEFAULT, ServerLimits
from tidegate.servers.multi_accept import accept_more
from tidegate.servers.role_guard import ServerSecurity

# Connections that wait to be accepted. aiohttp's 128 makes a burst of callers wait out TCP's retransmissions.
_BACKLOG: Final = 4096
# What was refused before it had all come is read on and dropped for so long, so that its sender can read why.
_LINGER_S: Final = 1.0
_log = logging.getLogger("tidegate.http")


@asynccontextmanager
async def open_http_server(
    routes: Iterable[web.AbstractRouteDef],
    host: str,
    port: int,
    *,
    key: str,
    max_body_bytes: int,
    grace_s: float,
    middlewares: Iterable[Middleware] = (),
    ahead: Callable[[Entrance], Entrance] | None = None,
    secured: ServerSecurity | None = None,
    limits: ServerLimits = DEFAULT,
    drain: HttpDrain | None = None,
    connections: ConnectionTable[HttpConnection] | None = None,
    allowed_origins: Collection[str] = (),
    handed: HandedSockets | None = None,
    path: Path | None = None,
) -> AsyncIterator[str]:
    """Serves `routes`; yields "http://HOST:PORT", or "https://HOST:PORT".

    Args:
        grace_s: the time that requests in progress get when the port closes.
        ahead: puts something before aiohttp's dispatch, which it is given; that something sees every request first.
        secured: TLS and the admitted roles; None: no encryption, every caller is admitted.
        limits: connections, headers, and how slowly they may come.
        drain: empties the port before it closes, at its owner's word.
        connections: of several ports that share one limit; None: the port has its own, by `limits`.
        allowed_origins: web sites besides the port's own whose pages may call it and read (`foreign_sites.py`).
        handed: sockets of `host` and `port` that its owner accepts on as it likes; None: they are bound here.
        path: serve on a unix socket at this path, which no other machine and no other account can reach.

    Raises:
        StartError: the port cannot be bound; names the port and `key`.
    """
    app = web.Application(client_max_size=max_body_bytes, middlewares=list(middlewares))
    app.add_routes(routes)
    sites = SitePolicy(host, allowed_origins)
    if allowed_origins:  # streams are prepared by their handlers
        app.on_response_prepare.append(sites.share)
    _log.addFilter(_is_news)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=grace_s, logger=_log)
    await runner.setup()
    if ahead is not None:
        assert runner.server is not None  # it is there once the runner is set up
        runner.server.request_handler = ahead(runner.server.request_handler)
    if secured is not None and secured.checks_roles:
        assert runner.server is not None
        runner.server.request_handler = _guarded(runner.server.request_handler, secured)
    assert runner.server is not None
    runner.server.request_handler = sites.ahead_of(runner.server.request_handler)
    drain = drain or HttpDrain()
    assert runner.server is not None
    drain.add(runner.server)
    try:
        try:
            table = connections if connections is not None else connection_table(limits)
            context = _context(secured) if path is None else None
            site = _Site(runner, host, port, context, limits, drain=drain, connections=table)
            await site.open(handed, path)
        except OSError as error:
            raise cannot_listen(host, port, key, error) from error
        bound = port if handed is not None or path is not None else runner.addresses[0][1]
        yield f"{'https' if secured else 'http'}://{format_address(host, bound)}"
    finally:
        if handed is not None:
            handed.close()
        await runner.cleanup()


def connection_table(limits: ServerLimits) -> ConnectionTable[HttpConnection]:
    """An empty table for one port, or for several that share its limit."""
    return ConnectionTable(max_connections=limits.connections, max_per_client=limits.max_connections_per_client)


class _Site(web.BaseSite):
    """A site of aiohttp's whose connections are `HttpConnection`s."""

    __slots__ = ("_connections", "_drain", "_host", "_limits", "_more", "_port")

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        context: ssl.SSLContext | None,
        limits: ServerLimits,
        drain: HttpDrain,
        connections: ConnectionTable[HttpConnection],
    ) -> None:
        super().__init__(runner, ssl_context=context, backlog=_BACKLOG)
        self._host = host
        self._port = port
        self._limits = limits
        self._drain = drain
        self._connections = connections
        self._more: list[asyncio.Server] = []

    @property
    def name(self) -> str:
        return f"{'https' if self._ssl_context else 'http'}://{format_address(self._host, self._port)}"

    async def start(self) -> None:
        await self.open()

    async def open(self, handed: HandedSockets | None = None, path: Path | None = None) -> None:
        """Listen; with handed sockets, whenever their owner says so."""
        await super().start()
        loop = asyncio.get_running_loop()
        if handed is not None:
            handed.begin(self._accept_on)
        elif path is not None:
            self._server = await loop.create_unix_server(self._visitor, str(path), backlog=self._backlog)
        else:
            self._server = await loop.create_server(self._visitor, self._host, self._port, **self._options())
            for one in self._server.sockets:
                self._more += await accept_more(one.fileno(), self._accept_on)

    async def stop(self) -> None:
        for one in self._more:
            one.close()
        await super().stop()

    async def _accept_on(self, one: socket.socket) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(self._visitor, sock=one, **self._options())

    def _options(self) -> dict[str, Any]:
        handshake_s = self._limits.header_timeout_s if self._ssl_context else None
        return {"ssl": self._ssl_context, "backlog": self._backlog, "ssl_handshake_timeout": handshake_s}

    def _visitor(self) -> HttpConnection:
        server, limits = self._runner.server, self._limits
        assert server is not None
        connection = HttpConnection(
            server,
            connections=self._connections,
            header_timeout_s=limits.header_timeout_s,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.idle_timeout_s,
            lingering_time=_LINGER_S,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            max_headers=limits.max_headers,
            access_log=None,
            logger=_log,
        )
        self._drain.greet(connection)
        return connection


def _context(secured: ServerSecurity | None) -> ssl.SSLContext | None:
    if secured is None:
        return None
    requested = ssl.CERT_OPTIONAL if secured.tls.config.client_ca else ssl.CERT_NONE
    return secured.tls.server_context(client_cert=ssl.CERT_REQUIRED if secured.require_client_cert else requested)


def _guarded(entrance: Entrance, secured: ServerSecurity) -> Entrance:
    """Answers 403 to callers whose certificate has none of the roles."""

    async def guarded(request: web.BaseRequest) -> web.StreamResponse:
        try:
            peercert = request.get_extra_info("peercert")
            check_role(alternative_names(peercert), secured.roles)
        except NotAllowed as error:
            return web.json_response({"error": str(error)}, status=403)
        if clock.utc_s() >= peer_expiry_utc_s(peercert):
            response = web.json_response({"error": "your certificate has expired: connect again"}, status=403)
            response.force_close()
            return response
        return await entrance(request)

    return guarded


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record is for an operator. Bytes that are no HTTP are not: their sender is told with a 400, while a
    traceback for each would let any scanner fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)

"""`HttpDrain` empties HTTP ports: what is under way as it begins is waited for, and its connections are not kept.

The ports stay open meanwhile: a caller that comes gets the refusal of the routes behind it, with words and a time to
retry, where a closed port would say nothing. So what came before is waited for by connection, and not until nothing is
in progress: refusals would be in progress for ever under load.

Invariant: a request that was received whole or in part behind its headers before `begin` is waited for.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from tidegate import clock
from tidegate.servers.http_connection import HttpConnection

POLL_S: Final = 0.02


class HttpDrain:
    """The drain of the servers that were added to it."""

    def __init__(self) -> None:
        self._servers: list[web.Server] = []
        self._waited: list[HttpConnection] = []
        self._begun = False

    def add(self, server: web.Server) -> None:
        """Include the connections of a server."""
        self._servers.append(server)

    def greet(self, connection: HttpConnection) -> None:
        """A client has connected; while the servers drain, it gets one answer."""
        if self._begun:
            connection.leave()

    def begin(self) -> None:
        """Every connection ends with its next answer from now on."""
        self._begun = True
        found = [one for server in self._servers for one in server.connections if isinstance(one, HttpConnection)]
        for connection in found:
            connection.leave()
        self._waited = [one for one in found if one.under_way]

    @property
    def under_way(self) -> int:
        """The number of connections with a request that came before `begin`."""
        self._waited = [one for one in self._waited if one.under_way]
        return len(self._waited)

    @property
    def connections(self) -> int:
        """The number of connections that are open, whatever happens on them."""
        return sum(len(server.connections) for server in self._servers)

    async def done(self) -> None:
        """Return when every request that came before `begin` is answered, or its caller gone."""
        while self.under_way:
            await clock.sleep(POLL_S)

    def __repr__(self) -> str:
        return f"<HttpDrain of {len(self._servers)} servers, {len(self._waited)} under way>"

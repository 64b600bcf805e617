"""How many connections a listening socket gives to the event loop at each of its turns.

libuv accepts one a turn for each descriptor that it watches. Where a turn is long, since many callers are answered in
it, those who connect in the same moment would wait for one turn each, and their budgets begin when they are seen: 30
of them beside 64 busy callers waited a quarter of a second. So a socket is watched by several descriptors, which share
one queue of connections.

Source: libuv, `uv__server_io`; seen with uvloop 0.23 by counting turns (`tests/tidegate/servers/test_http_server.py`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Final

ACCEPTED_A_TURN: Final = 8  # each costs a call of the system, in vain where only one connects
AcceptOn = Callable[[socket.socket], Awaitable[asyncio.Server]]


async def accept_more(fd: int, accept_on: AcceptOn, count: int = ACCEPTED_A_TURN - 1) -> list[asyncio.Server]:
    """Accept by `count` further descriptors of a listening socket. Closing them leaves the socket and its queue alone.

    Args:
        accept_on: starts to accept on a socket, which it owns then.
    """
    servers: list[asyncio.Server] = []
    try:
        for _ in range(count):
            servers.append(await accept_on(socket.socket(fileno=os.dup(fd))))
    except BaseException:
        for one in servers:
            one.close()
        raise
    return servers

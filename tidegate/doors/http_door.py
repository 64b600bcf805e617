"""An HTTP port over aiohttp. A caller who hangs up cancels its request, all the way down to the queue it waits in."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from tidegate.doors.address import cannot_listen, joined

Entrance = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

# Connections that wait to be accepted. aiohttp's 128 makes a burst of callers wait out TCP's retransmissions.
_BACKLOG: Final = 4096
_log = logging.getLogger("tidegate.http")


@asynccontextmanager
async def http_door(
    routes: Iterable[web.AbstractRouteDef],
    host: str,
    port: int,
    *,
    key: str,
    max_body_bytes: int,
    grace_s: float,
    middlewares: Iterable[Middleware] = (),
    ahead: Callable[[Entrance], Entrance] | None = None,
) -> AsyncIterator[str]:
    """Serves `routes`; yields "http://HOST:PORT".

    Args:
        grace_s: what requests still under way get when the door closes.
        ahead: puts something before aiohttp's dispatch, which it is given; that something sees every request first.

    Raises:
        StartError: nobody can listen there; names the port and `key`.
    """
    app = web.Application(client_max_size=max_body_bytes, middlewares=list(middlewares))
    app.add_routes(routes)
    _log.addFilter(_is_news)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=grace_s, logger=_log)
    await runner.setup()
    if ahead is not None:
        assert runner.server is not None  # it is there once the runner is set up
        runner.server.request_handler = ahead(runner.server.request_handler)
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
        except OSError as error:
            raise cannot_listen(host, port, key, error) from error
        yield f"http://{joined(host, runner.addresses[0][1])}"
    finally:
        await runner.cleanup()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record is for an operator. Bytes that are no HTTP are not: their sender is told with a 400, while a
    traceback for each would let any scanner fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)

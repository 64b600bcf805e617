"""An edge's doors: one gRPC port for OIP and the gateway's link streams, one HTTP port for callers on the device or its
LAN.

Both open before the models are warm, so that whoever asks is told "not ready" instead of being refused by the kernel;
and a port that somebody else holds ends the start in its first second, by the name of its configuration key.

Each is an async context manager that yields its address. At the end of the gRPC server the calls that are left get
STOP_GRACE_S; draining was done before by whoever entered it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
from aiohttp import web

from edge_agent.host import EdgeHost
from edge_agent.runner import StartError
from tidegate.link.answerer import LinkService, add_link_service
from tidegate.oip.grpc_server import add_oip_service, server_options
from tidegate.oip.http_server import error_middleware, oip_routes

STOP_GRACE_S = 0.2


@asynccontextmanager
async def grpc_door(
    host: EdgeHost, address: str, port: int, *, epoch: Callable[[], int], max_message_bytes: int
) -> AsyncIterator[tuple[str, LinkService]]:
    """OIP and link streams over gRPC; yields "HOST:PORT" and the link service."""
    _check_free(address, port, "grpc_port")
    server = grpc.aio.server(options=server_options(max_message_bytes))
    add_oip_service(server, host, max_message_bytes=max_message_bytes)
    link = add_link_service(
        server,
        host,
        name=host.server_name,
        epoch=epoch,
        offers=host.offers,
        load=host.load_report,
        max_message_bytes=max_message_bytes,
    )
    try:
        bound_port = server.add_insecure_port(_joined(address, port))
    except RuntimeError as error:  # somebody was faster than the check
        raise StartError(f"cannot listen on {_joined(address, port)} (key 'grpc_port'): {error}") from error
    await server.start()
    try:
        yield _joined(address, bound_port), link
    finally:
        await server.stop(STOP_GRACE_S)


@asynccontextmanager
async def http_door(host: EdgeHost, address: str, port: int, *, max_body_bytes: int) -> AsyncIterator[str]:
    """OIP over HTTP; yields "http://HOST:PORT"."""
    app = web.Application(client_max_size=max_body_bytes, middlewares=[error_middleware])
    app.add_routes(oip_routes(host, max_body_bytes=max_body_bytes))
    # handler_cancellation: a caller who hangs up leaves the queue.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_GRACE_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, address, port).start()
        except OSError as error:
            raise _cannot_listen(address, port, "http_port", error) from error
        yield f"http://{_joined(address, runner.addresses[0][1])}"
    finally:
        await runner.cleanup()


def _check_free(address: str, port: int, key: str) -> None:
    """Find out that a port is taken before gRPC does, who logs it several times over and names no reason."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as error:
        raise _cannot_listen(address, port, key, error) from error


def _cannot_listen(address: str, port: int, key: str, error: OSError) -> StartError:
    where = f"cannot listen on {_joined(address, port)} (key {key!r})"
    if error.errno == errno.EADDRINUSE:
        return StartError(f"{where}: port {port} is taken")
    return StartError(f"{where}: {os.strerror(error.errno) if error.errno and error.errno > 0 else error}")


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

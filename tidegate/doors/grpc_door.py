"""A gRPC port: bound before anything slow begins, started when there is something to answer, stopped with a grace.

Binding and starting are two steps, because a pool takes its port first (so that a taken one is known before minutes of
warm-up) and answers last, while an edge answers "not ready" from the beginning.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import grpc

from tidegate.doors.address import check_free, joined
from tidegate.oip.grpc_server import server_options
from tidegate.process import StartError


class GrpcDoor(NamedTuple):
    """A bound port. `start` the server once; leaving the door stops it."""

    address: str  # "HOST:PORT"
    server: grpc.aio.Server


@asynccontextmanager
async def grpc_door(
    add_services: Callable[[grpc.aio.Server], None],
    host: str,
    port: int,
    *,
    max_message_bytes: int,
    grace_s: float,
    key: str = "grpc_port",
) -> AsyncIterator[GrpcDoor]:
    """A bound gRPC server with the services that `add_services` puts on it.

    Args:
        grace_s: what calls still under way get when the door closes; draining is its owner's matter.

    Raises:
        StartError: nobody can listen there; names the port and `key`.
    """
    check_free(host, port, key)
    server = grpc.aio.server(options=server_options(max_message_bytes))
    add_services(server)
    try:
        bound = server.add_insecure_port(joined(host, port))
    except RuntimeError as error:  # somebody was faster than the check
        raise StartError(f"cannot listen on {joined(host, port)} (key {key!r}): {error}") from error
    try:
        yield GrpcDoor(joined(host, bound), server)
    finally:
        await server.stop(grace_s)

"""A gRPC port: bound before anything slow begins, started when there is something to answer, stopped with a grace.

Binding and starting are two steps, because a pool takes its port first (so that a taken one is known before minutes of
warm-up) and answers last, while an edge answers "not ready" from the beginning.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import grpc

from tidegate.oip.grpc.server import server_options
from tidegate.runtime.process import StartError
from tidegate.servers.address import check_free, format_address
from tidegate.servers.limits import DEFAULT, ServerLimits
from tidegate.servers.role_guard import RoleGuard, ServerSecurity


class BoundGrpcServer(NamedTuple):
    """A bound port. `start` the server once; leaving the context stops it."""

    address: str  # "HOST:PORT"
    server: grpc.aio.Server


@asynccontextmanager
async def open_grpc_server(
    add_services: Callable[[grpc.aio.Server], None],
    host: str,
    port: int,
    *,
    max_message_bytes: int,
    grace_s: float,
    key: str = "grpc_port",
    secured: ServerSecurity | None = None,
    limits: ServerLimits = DEFAULT,
    shares_port: bool = False,
) -> AsyncIterator[BoundGrpcServer]:
    """A bound gRPC server with the services that `add_services` puts on it.

    Args:
        grace_s: the time that calls in progress get when the port closes; the owner drains before.
        secured: TLS and the admitted roles; None: no encryption, every caller is admitted.
        limits: connections, streams on each, and metadata.
        shares_port: whether other processes of this account listen there too, so that each gets a part of the
            connections; whoever started them has found the port free.

    Raises:
        StartError: the port cannot be bound; names the port and `key`.
    """
    if not shares_port:
        check_free(host, port, key)
    options = [*server_options(max_message_bytes, shares_port=shares_port), *_bounds(limits)]
    server = grpc.aio.server(options=options, interceptors=_guards(secured))
    add_services(server)
    try:
        bound = _bind(server, format_address(host, port), secured)
    except RuntimeError as error:  # another process took the port after the check
        raise StartError(f"cannot listen on {format_address(host, port)} (key {key!r}): {error}") from error
    try:
        yield BoundGrpcServer(format_address(host, bound), server)
    finally:
        await server.stop(grace_s)


def _bounds(limits: ServerLimits) -> list[tuple[str, int]]:
    """The limits, as far as gRPC keeps them."""
    return [
        ("grpc.max_concurrent_streams", limits.max_streams),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.max_connection_idle_ms", int(limits.idle_timeout_s * 1e3)),
        ("grpc.server_handshake_timeout_ms", int(limits.header_timeout_s * 1e3)),  # to its end: TLS and HTTP/2
        # Up to the first gRPC refuses with rising chance, from the second on always.
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", 2 * limits.max_header_bytes),
    ]


def _guards(secured: ServerSecurity | None) -> list[RoleGuard]:
    if secured is None or not secured.checks_roles:
        return []  # each call pays for a guard
    tls = secured.tls
    return [RoleGuard(secured.roles, tls.min_version("1.3"), secured.narrowed, lambda: tls.fresh().cert)]


def _bind(server: grpc.aio.Server, address: str, secured: ServerSecurity | None) -> int:
    if secured is None:
        return server.add_insecure_port(address)
    credentials = secured.tls.server_credentials(require_client_cert=secured.require_client_cert)
    return server.add_secure_port(address, credentials)

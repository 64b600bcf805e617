"""gRPC's standard health service over a `ModelHost`, for load balancers and `grpc_health_probe`.

The library's own servicer must be notified of every change; this one reads the state of the host instead, so health
can never differ from it. A watcher gets the state at once, and again whenever a check each second finds a change. When
the server drains, a watcher is told at once, and its stream ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tidegate.oip.host import ModelHost

HEALTH_SERVICE: Final[str] = health.SERVICE_NAME
WATCH_INTERVAL_S: Final = 1.0

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library has no types
    """`services` are the names that have a status, beside "" for the whole server."""

    def __init__(self, host: ModelHost, services: tuple[str, ...], draining: asyncio.Event | None = None) -> None:
        self._draining = draining or asyncio.Event()
        self._host = host
        self._services = frozenset({"", health.SERVICE_NAME, *services})

    def __repr__(self) -> str:
        return f"<HealthService {self._host.server_name} {'serving' if self._host.ready() else 'not serving'}>"

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        told = None
        while True:
            draining = self._draining.is_set()
            status = self._status(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            if draining:
                return
            await _first(self._draining, WATCH_INTERVAL_S)

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(_UNKNOWN)
        return int(_SERVING if self._host.ready() else _NOT_SERVING)


async def _first(event: asyncio.Event, within_s: float) -> None:
    """Return when the event is set, or when the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()

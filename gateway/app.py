"""The composition root: what a gateway is made of, in the order in which it is put together.

Everything is given its parts here and nowhere else. `async with Gateway(config)` starts it, in a test as in a
process: targets first, so that links are dialled while the doors are being hung, doors last; closing goes backwards,
so that requests under way are answered before their targets go.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal

import grpc
import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.access_log import AccessLog
from gateway.admin import admin_routes
from gateway.catalog import Catalog
from gateway.conductor import Conductor
from gateway.config import GatewayConfig
from gateway.core.crossing import Crossing
from gateway.core.fleet import Fleet
from gateway.core.hedging import Hedges, LatestUseful
from gateway.core.placement import Placer
from gateway.core.value import ValuePlacer
from gateway.directory import Directory
from gateway.host import GatewayHost
from gateway.layers.admit import admit
from gateway.layers.expire import expire
from gateway.layers.observe import Observer, observe
from gateway.layers.stack import stack
from gateway.metrics import Metrics
from gateway.protocols.openai import openai_routes
from gateway.protocols.tokens import Tokenizers
from gateway.sync import FleetSync
from tidegate import clock, events
from tidegate.doors.grpc_door import grpc_door
from tidegate.doors.http_door import Entrance, http_door
from tidegate.limit import Limit
from tidegate.models.repository import Repository
from tidegate.oip.grpc_server import add_oip_service
from tidegate.oip.http_server import OipRoutes, error_middleware
from tidegate.types import InferRequest

log = structlog.get_logger(__name__)

DRAIN_S = 1.0  # each door's; with the links' goodbyes a stop stays under 3 s
STATIC_TARGETS_WITHIN_S = 5.0


class Gateway:
    """One gateway. `async with` starts and stops it; `addresses` says where it answers."""

    def __init__(self, config: GatewayConfig, *, draw: Callable[[], float] = random.random) -> None:
        self.config = config
        self.addresses: dict[str, str] = {}
        self.repository = Repository(config.model_repository or Path())  # without one nobody will ask it for a folder
        self.catalog = Catalog(self.repository.manifests() if config.model_repository else ())
        self.tokenizers = Tokenizers(self.repository)
        self.limit = Limit(config.max_in_flight)
        self.fleet = Fleet(self.catalog.feature_of)
        self.directory = Directory(
            self.fleet,
            self.catalog,
            [target.spec for target in config.targets],
            gateway_name=config.name,
            edge_transport=config.edge_transport,
            max_message_bytes=config.max_body_bytes,
            draw=draw,
        )
        placer, hedges = _policy(config.policy, self.fleet)
        self.conductor = Conductor(
            placer,
            self.directory.targets,
            self.catalog.manifest,
            draw=draw,
            remember=config.remember_decisions,
            hedges=hedges,
        )
        self.metrics = Metrics(self.fleet, self.limit, version_of=self._version_of)
        infer = stack(
            observe(clock.now, *self._observers()),  # outermost: sees every outcome, also of the layers below
            expire(clock.now, self._default_budget_s),  # fixes the deadline, once
            admit(self.limit, clock.now),  # after expire: nothing late takes a place
            inner=self.conductor.infer,  # drives core/request.py: places, launches, hedges, falls back
        )
        self.host = GatewayHost(config.name, self.catalog, self.fleet, self.metrics, infer)
        self._draw = draw
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Gateway:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def static_targets_tried(self, within_s: float) -> None:
        """Wait until each static target was reached or found unreachable, so that the first request finds them."""
        give_up_at = clock.now() + within_s
        while not self.directory.settled and clock.now() < give_up_at:
            await clock.sleep(0.02)

    async def _start(self) -> None:
        self._stack.push_async_callback(self.conductor.close)
        await self._stack.enter_async_context(self.directory)
        if self.config.mqtt:
            await self._follow_fleet(self.config.mqtt)
        await self.tokenizers.load(self.catalog.manifests)  # before the doors: no caller waits for it
        await self._open_grpc_door()
        await self._open_http_doors()

    async def _follow_fleet(self, url: str) -> None:
        sync = FleetSync(url, self.config.fleet, self.config.name, self.directory.devices_changed, self._draw)
        self.directory.register = sync.register
        await self._stack.enter_async_context(sync)

    async def _open_grpc_door(self) -> None:
        config = self.config
        door = await self._stack.enter_async_context(
            grpc_door(
                self._add_services,
                config.host,
                config.grpc_port,
                max_message_bytes=config.max_body_bytes,
                grace_s=DRAIN_S,
            )
        )
        await door.server.start()
        self.addresses["grpc"] = door.address

    def _add_services(self, server: grpc.aio.Server) -> None:
        limit = self.config.max_body_bytes
        add_oip_service(server, self.host, max_message_bytes=limit, on_refused=self.metrics.refused)

    async def _open_http_doors(self) -> None:
        config = self.config
        limit, refused = config.max_body_bytes, self.metrics.refused
        oip = OipRoutes(self.host, max_body_bytes=limit, on_refused=refused)
        inference = [
            *oip.table(),
            *openai_routes(self.host, self.tokenizers, max_body_bytes=limit, on_refused=refused),
        ]
        admin = admin_routes(self.fleet, self.catalog, self.conductor)
        await self._open_http_door(
            "http", config.http_port, inference, middlewares=[error_middleware], ahead=oip.ahead_of
        )
        await self._open_http_door("metrics", config.metrics_port, [web.get("/metrics", self._scrape)])
        await self._open_http_door("admin", config.admin_port, admin)

    async def _open_http_door(
        self,
        name: str,
        port: int,
        routes: Iterable[web.AbstractRouteDef],
        *,
        middlewares: Iterable[Middleware] = (),
        ahead: Callable[[Entrance], Entrance] | None = None,
    ) -> None:
        door = http_door(
            routes,
            self.config.host,
            port,
            key=f"{name}_port",
            max_body_bytes=self.config.max_body_bytes,
            grace_s=DRAIN_S,
            middlewares=middlewares,
            ahead=ahead,
        )
        self.addresses[name] = await self._stack.enter_async_context(door)

    async def _scrape(self, _request: web.Request) -> web.Response:
        body = generate_latest(self.metrics.registry())
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _observers(self) -> list[Observer]:
        observers: list[Observer] = [self.metrics]
        if self.config.access_log == "json":
            observers.append(AccessLog(self.conductor.describe, events.emit))
        elif self.config.access_log == "text":
            observers.append(AccessLog(self.conductor.describe, log.info))
        return observers

    def _default_budget_s(self, request: InferRequest) -> float:
        return self.catalog.manifest(request.model_name, request.model_version).default_budget_s

    def _version_of(self, request: InferRequest) -> str:
        return self.catalog.manifest(request.model_name, request.model_version).version

    def __repr__(self) -> str:
        return f"<Gateway {self.config.name} {self.addresses} {self.fleet!r}>"


def _policy(name: Literal["cheapest", "value"], fleet: Fleet) -> tuple[Placer, Hedges]:
    """Where to place, and the hedging that goes with it: chances are only there where placement deals in them."""
    if name == "cheapest":
        return Placer(fleet), LatestUseful()
    placer = ValuePlacer(fleet)
    return placer, Crossing(placer)


async def serve(config: GatewayConfig) -> None:
    """Run a gateway until cancelled, and say on stdout when it is ready."""
    async with Gateway(config) as gateway:
        await gateway.static_targets_tried(STATIC_TARGETS_WITHIN_S)
        _settle_garbage_collector()
        models = sorted({manifest.name for manifest in gateway.catalog.manifests})
        log.info("serving without authentication: any or no API key works", **gateway.addresses)
        events.emit("ready", role="gateway", name=config.name, addresses=gateway.addresses, models=models)
        try:
            await asyncio.Event().wait()
        finally:
            log.info("stopping")


def _settle_garbage_collector() -> None:
    """What the start made lives for ever: never look at it again, and look at the rest rarely (pauses are jitter)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)

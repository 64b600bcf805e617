"""The delivery service puts together the artefact store, its port for devices, the admin routes and the rollouts.

It is separate from `gateway/app.py` because a gateway without the section `artifacts` has none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack

import structlog
from aiohttp import web

from gateway.catalog import Catalog
from gateway.config.artifacts import ArtifactsConfig
from gateway.core.fleet.fleet import Fleet
from gateway.delivery.artifacts.access import certificate_check, credential_check, secured_for_devices
from gateway.delivery.artifacts.pacing import BytePacer
from gateway.delivery.artifacts.partial_ledger import PartialBounds
from gateway.delivery.artifacts.server import ArtifactServer
from gateway.delivery.artifacts.store import ArtifactStore
from gateway.delivery.artifacts.upload import intake_routes
from gateway.delivery.rollouts.conductor_lease import ConductorLease
from gateway.delivery.rollouts.coordinator import DeviceChannel, RolloutController
from gateway.delivery.rollouts.routes import rollout_routes
from gateway.delivery.trials import Trials
from gateway.identity.guard import GatewayGuard
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.oip.http.server import error_middleware
from tidegate.runtime.owned_task import OwnedTask
from tidegate.security.standing import StandingWatch
from tidegate.security.tls import Tls
from tidegate.servers.connection_limits import ConnectionTable
from tidegate.servers.http_connection import HttpConnection
from tidegate.servers.http_server import open_http_server
from tidegate.servers.limits import ServerLimits

COLLECT_S = 600.0
log = structlog.get_logger(__name__)

GRACE_S = 1.0  # a download that is cut resumes by range


class DeliveryService:
    """Artefacts and rollouts of one gateway; `async with` opens the port and resumes rollouts.

    Args:
        host: the address to listen on, if the section has none.
        channel: the session with the broker.
        connections: what the port counts its connections in, with other ports.
        lease: decides whether this gateway conducts rollouts; None: it does.
    """

    def __init__(
        self,
        section: ArtifactsConfig,
        *,
        host: str,
        channel: DeviceChannel,
        catalog: Catalog,
        fleet: Fleet,
        trials: Trials,
        guard: GatewayGuard | None,
        tls: Tls | None,
        limits: ServerLimits,
        connections: ConnectionTable[HttpConnection],
        lease: ConductorLease | None = None,
    ) -> None:
        self.address = ""
        self._section = section
        self._host = section.host or host
        self._channel = channel
        self._catalog = catalog
        self._fleet = fleet
        self._limits = limits
        self._connections = connections
        self._secured = secured_for_devices(tls)
        self._standing = StandingWatch()  # of certificates; the guard has its own
        self.store = ArtifactStore(
            section.folder,
            max_artifact_bytes=section.max_artifact_bytes,
            partials=PartialBounds(section.max_partials, section.max_partial_bytes, section.partials_kept_s),
        )
        self._collector = OwnedTask(self._collect, name="unfinished uploads", crash_means="they stay on the disk")
        self.server = ArtifactServer(
            self.store,
            admit=certificate_check(self._standing)
            if self._secured is not None and self._secured.checks_roles
            else credential_check(guard, self._secured),
            max_concurrent=section.max_concurrent,
            pace=BytePacer(section.rate),
        )
        self.rollouts = RolloutController(self.store, channel, self._ship, trials, fleet.serving, lease)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> DeliveryService:
        async with self._stack:
            if self._section.port is not None:
                await self._stack.enter_async_context(self._standing)
                port = open_http_server(
                    self.server.routes(),
                    self._host,
                    self._section.port,
                    key="artifacts.port",
                    max_body_bytes=4096,  # devices send no bodies here
                    grace_s=GRACE_S,
                    middlewares=[error_middleware],
                    secured=self._secured,
                    limits=self._limits,
                    connections=self._connections,
                )
                self.address = await self._stack.enter_async_context(port)
            if self.rollouts.lease is not None:
                await self._stack.enter_async_context(self.rollouts.lease)
            await self._stack.enter_async_context(self.rollouts)
            self._collector.start()
            self._stack.push_async_callback(self._collector.aclose)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def admin_routes(self) -> list[web.RouteDef]:
        """Return the routes for the admin port: uploads and rollouts."""
        base = self._section.advertise or self.address
        return [*intake_routes(self.store), *rollout_routes(self.rollouts, self._channel, (base,) if base else ())]

    async def _collect(self) -> None:
        """Remove what is unfinished and old: at the start, since an earlier process may have left it, and then on."""
        while True:
            try:
                if removed := await asyncio.to_thread(self.store.collect):
                    log.info("removed unfinished uploads that had not grown", count=len(removed))
            except OSError as error:
                log.warning("unfinished uploads cannot be removed", reason=str(error))
            await clock.sleep(min(COLLECT_S, self._section.partials_kept_s))

    def _ship(self, manifests: Iterable[Manifest]) -> None:
        self._catalog.ship(manifests)
        self._fleet.repriced()

    def __repr__(self) -> str:
        return f"<DeliveryService {self.address or 'no port'} {self.rollouts!r}>"

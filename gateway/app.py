"""The composition root: a gateway's parts are made and connected here, in the order of their dependencies.

`async with Gateway(config)` starts a gateway, in a test as in a process: targets first, so that links are dialled while
the servers are being opened, servers last. Closing goes backwards, within `drain_s` plus a moment (`drain.py`), so that
requests under way are answered before their targets are closed.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex

import grpc
import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.catalog import Catalog
from gateway.config.artifacts import ArtifactsConfig
from gateway.config.gateway import GatewayConfig
from gateway.core.access.broker_rights import BrokerRights
from gateway.core.admission.quarantine import Quarantine
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.name_claims import NameClaims
from gateway.core.fleet.scaling import ReplicaScaler
from gateway.core.fleet.target import TargetSpec
from gateway.core.history.recorder import FlightRecorder
from gateway.default_versions import DefaultVersions
from gateway.delivery.service import DeliveryService
from gateway.delivery.trials import Trials
from gateway.drain import CLOSE_GRACE_S, GatewayDrain
from gateway.fleet_sync.registry import FleetRegister
from gateway.fleet_sync.sync import FleetSync
from gateway.host import GatewayHost
from gateway.http.openapi import openapi_routes
from gateway.identity.audit import Audit
from gateway.identity.guard import GatewayGuard
from gateway.ingest.service import IngestService
from gateway.layers.admit import admit
from gateway.layers.authenticate import authenticate
from gateway.layers.expire import expire
from gateway.layers.observe import observe
from gateway.layers.quarantine import QuarantineListener, quarantine
from gateway.layers.stack import Service, stack
from gateway.layers.versions import versions
from gateway.link_port import advertised_dial_address, dial_in_server_of, link_port
from gateway.observe.conditions import OtherCondition, loop_conditions, name_conditions
from gateway.operate.admin_routes import admin_middlewares, operator_routes, require_right
from gateway.operate.console.history import ConsoleHistory
from gateway.operate.trial_report import trial_families
from gateway.operate.trial_routes import trial_routes
from gateway.placement_policy import admission_of, placement_of, policy_of
from gateway.serving.dispatcher import Dispatcher
from gateway.targets.attestation_verifier import AttestationVerifier
from gateway.targets.condition_log import HealthLog, log_condition, log_name_conflict
from gateway.targets.directory import Directory
from gateway.telemetry import Telemetry, run_soon
from tidegate import clock
from tidegate.fleet.topics import Topics
from tidegate.generate.text.text_models import TextModels
from tidegate.link.client import ROOM_BYTES
from tidegate.models.generative import Generative
from tidegate.models.repository import Repository
from tidegate.models.share_weights import ShareWeights
from tidegate.oip.body_budget import BodyMemory
from tidegate.oip.grpc.server import OipService
from tidegate.oip.guard import DrainingGuard, OpenGuard
from tidegate.oip.http.server import OipRoutes, error_middleware
from tidegate.openai.routes import openai_routes
from tidegate.openai.tokens import Tokenizers
from tidegate.outcome import ModelNotFound
from tidegate.runtime import events
from tidegate.runtime.process import StartError
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.tls import Dialler, PlainDialler, Tls, check_encrypted, tls_of
from tidegate.servers.address import is_loopback, port_of
from tidegate.servers.grpc_server import open_grpc_server
from tidegate.servers.http_drain import HttpDrain
from tidegate.servers.http_server import Entrance, connection_table, open_http_server
from tidegate.servers.limits import PortGroup, limits_by_port, raise_file_limit
from tidegate.servers.operator_token import OperatorToken
from tidegate.servers.role_guard import ServerSecurity
from tidegate.types import InferRequest, TargetId

log = structlog.get_logger(__name__)

STATIC_TARGETS_WITHIN_S = 5.0


class Gateway:
    """One gateway. `async with` starts and stops it; `addresses` says where it answers."""

    def __init__(self, config: GatewayConfig, *, draw: Callable[[], float] = random.random) -> None:
        self.config = config
        self._draw = draw
        self.addresses: dict[str, str] = {}
        self.tls = tls_of(config.tls, lambda: CertificateIdentity("gateway", config.name))
        check_encrypted(config.mqtt, self.tls)
        self._secured = ServerSecurity(self.tls) if self.tls else None  # any caller: the layers check its identity
        self.repository = Repository(config.model_repository or Path())  # without one it is never asked for a folder
        self.catalog = Catalog(self.repository.manifests() if config.model_repository else ())
        self.tokenizers = Tokenizers(self.repository)
        self.texts = TextModels(self.repository)
        scaling = ReplicaScaler(config.scaling.spec)
        self.fleet = Fleet(self.catalog.feature_of, draw=draw, scaling=scaling)
        self.defaults = DefaultVersions(self.catalog, self.fleet)
        self.verifier = _verifier_of(config, self.tls, draw)
        self.claims = NameClaims()  # of devices' names, over MQTT as on streams that they dial
        self.register = FleetRegister(Topics(config.fleet), draw=draw, claims=self.claims) if config.mqtt else None
        self.broker_rights = BrokerRights(config.fleet, config.name)
        self.dialled_in = dial_in_server_of(config, self.tls, self._knows, self.claims)
        self.directory = Directory(
            self.fleet,
            self.catalog,
            [target.spec for target in config.targets],
            gateway_name=config.name,
            edge_transport=config.edge_transport,
            max_message_bytes=config.max_body_bytes + ROOM_BYTES,
            draw=draw,
            dialler_of=self._dialler_of,
            networks=config.networks,
            verifier=self.verifier,
            dialled_in=self.dialled_in,
            register=self.register,
        )
        self.admission = admission_of(config, self.fleet, draw)
        self._shares = ShareWeights(config.shares)
        strained = lambda: self.admission.overloaded() or self.fleet.balance.panic  # noqa: E731
        held = Quarantine()
        self.dispatcher = self._new_dispatcher(held, strained)
        generates = lambda request: self._generative_of(request) is not None  # noqa: E731
        self.watch = ConsoleHistory(self.fleet, lambda: self.admission.in_flight, generates) if config.console else None
        self.telemetry = Telemetry(
            config,
            self.dispatcher,
            self.admission,
            held,
            self._version_of,
            scaling,
            console=self.watch,
            others=self._other_conditions,
        )
        self.metrics = self.telemetry.metrics
        self.trials = Trials(config.trials_file, self.defaults, draw, strained, self.dispatcher.infer)
        self.metrics.add(lambda: trial_families(self.trials))
        behind, infer = self._line(held)
        self.ingest_service = (
            IngestService(config.ingest, config.name, behind, self.defaults.manifest) if config.ingest else None
        )
        self.host = GatewayHost(config.name, self.defaults, self.fleet, self.metrics, infer)
        self.audit = Audit()
        self.operator_token = OperatorToken()  # for changes over the admin port, where `auth` does not guard it
        self.guard = GatewayGuard(config.auth, self.host, self.admission, self.audit) if config.auth else None
        self._entry = DrainingGuard(self.guard or OpenGuard(self.host), self.host.server_name)
        self._held = BodyMemory(config.limits.max_held_bytes)
        self._oip_over_grpc = self._oip_service()
        self._limits = limits_by_port(config.limits.door, _port_groups(config))
        self._operators = connection_table(self._limits["operators"])  # of the ports for metrics, operators and models
        self._http_drains = HttpDrain(), HttpDrain()  # of the inference port, and of the operators'
        self._shipping: DeliveryService | None = None  # once there is a broker to reach devices by
        self._stack = AsyncExitStack()
        self._connect_observers()

    def _connect_observers(self) -> None:
        """The second phase: what observes a part and reads the same part is connected once both exist.

        No other module assigns to an attribute of a finished object.
        """
        # The log of the fleet's health reads the fleet's balance.
        self.fleet.on_health, self.fleet.on_condition = HealthLog(self.fleet).log_health, log_condition
        self.claims.on_change = log_name_conflict
        # The directory reads the server's streams, and the server reports each of them to the directory.
        if self.dialled_in is not None:
            self.dialled_in.on_in, self.dialled_in.on_left = self.directory.dialled, self.directory.hung_up
        # A scrape has the recorder pack its records first, and the metrics count each record that is packed.
        recorder, telemetry = self.dispatcher.recorder, self.telemetry
        recorder.taps.append(telemetry.metrics.landed)
        if telemetry.trace_sampler is not None:
            recorder.watchers.append(telemetry.trace_sampler.landed)
        # The exposition merges what other processes share, and its own families are shared with them.
        if telemetry.sharing is not None:
            telemetry.sharing.own = telemetry.exposition.own

    def _new_dispatcher(self, held: Quarantine, strained: Callable[[], bool]) -> Dispatcher:
        config, draw = self.config, self._draw
        placer, hedges = policy_of(config, self.fleet, draw, strained)
        return Dispatcher(
            placer,
            self.directory.targets,
            self.defaults.manifest,
            draw=draw,
            memory=FlightRecorder(config.remember_decisions, config.remember_bytes, run=token_hex(3), defer=run_soon),
            hedges=hedges,
            overloaded=strained,
            placement=placement_of(placer, self.fleet, self.admission, draw, strained),
            weight_of=self.admission.weight_of,
            shares=self._shares,
            listener=QuarantineListener(held, clock.now),
        )

    def _line(self, held: Quarantine) -> tuple[Service, Service]:
        """The services for deferred and for live requests, each with its layers, outermost first."""
        behind = stack(  # a deferred request has no caller: no layer counts live traffic or authenticates
            expire(clock.now, self._default_budget_s),  # fixes the deadline, once
            quarantine(held, clock.now),  # before admit: a call that is refused here takes no place
            admit(self.admission, clock.now, self._share_of),  # after expire: nothing late takes a place
            versions(self.defaults, clock.now, self._draw, self.trials),  # where there are two
            inner=self.dispatcher.infer,  # drives gateway/core/request/machine.py: places, launches, hedges, falls back
        )
        called = stack(
            *self.telemetry.layers,  # traces: whatever is counted or logged further in can name its trace
            observe(clock.now, *self.telemetry.observers),  # outermost: sees every outcome, also of the layers below
            authenticate(self.admission, clock.now, self._generative_of),  # the identity of the call, and its rights
            inner=behind,
        )
        return behind, called

    def _share_of(self, request: InferRequest) -> float:
        """The weight of the request's model."""
        return self._shares.of(self.defaults.manifest(request.model_name, request.model_version))

    def _generative_of(self, request: InferRequest) -> Generative | None:
        """What is said of the request's model, if it generates; None of one that is not known."""
        try:
            return self.defaults.manifest(request.model_name, request.model_version).generative
        except ModelNotFound:
            return None

    async def __aenter__(self) -> Gateway:
        async with self._stack:
            await self._start()
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def static_targets_tried(self, within_s: float) -> None:
        """Wait until each static target was reached or found unreachable, so that the first request finds them."""
        give_up_at = clock.now() + within_s
        while not self.directory.settled and clock.now() < give_up_at:
            await clock.sleep(0.02)

    async def _start(self) -> None:
        await self._stack.enter_async_context(self.telemetry)
        self._stack.push_async_callback(self.dispatcher.close)
        self._stack.callback(self.audit.close)
        if self.guard is not None:
            await self._stack.enter_async_context(self.guard)
        if self.verifier is not None:
            await self._stack.enter_async_context(self.verifier)
        await self._stack.enter_async_context(self.directory)
        await self._stack.enter_async_context(self.trials)
        await self._open_link_port()
        if self.config.mqtt:
            await self._follow_fleet(self.config.mqtt)
        await self.tokenizers.load(self.catalog.manifests)  # before the servers: no caller waits for it
        self._stack.push_async_callback(self.texts.aclose)
        await self.texts.load(self.catalog.manifests)
        await self.texts.start_rendering()
        if self.watch is not None:
            await self._stack.enter_async_context(self.watch)
        server = await self._open_grpc_server()
        await self._open_http_servers()
        drain = GatewayDrain(self.host, self._entry, self._oip_over_grpc, server, self._http_drains)
        self._stack.push_async_callback(drain.run, self.config.drain_s)

    async def _follow_fleet(self, url: str) -> None:
        tls = self.tls.client_context if self.tls else None
        links = advertised_dial_address(self.config, self.addresses["link"]) if "link" in self.addresses else ()
        service = self.ingest_service
        ingest = (await self._stack.enter_async_context(service)).ingest if service is not None else None
        named = self.config.fleet, self.config.name
        sync = FleetSync(
            url,
            *named,
            self._fleet_changed,
            self._draw,
            register=self.register,
            tls=tls,
            links=links,
            ingest=ingest,
            rights=self.broker_rights,
        )
        if ingest is not None:  # the second phase again: messages come in by the sync, and receipts leave by it
            ingest.send = sync.send_receipt
        await self._stack.enter_async_context(sync)
        if self.config.artifacts is not None:
            await self._ship(self.config.artifacts, sync)

    async def _ship(self, section: ArtifactsConfig, channel: FleetSync) -> None:
        self._shipping = DeliveryService(
            section,
            host=self.config.host,
            channel=channel,
            catalog=self.catalog,
            fleet=self.fleet,
            trials=self.trials,
            guard=self.guard,
            tls=self.tls,
            limits=self._limits["operators"],
            connections=self._operators,
        )
        await self._stack.enter_async_context(self._shipping)
        if self._shipping.address:
            self.addresses["artifacts"] = self._shipping.address

    def _fleet_changed(self) -> None:
        self.directory.devices_changed()
        if self._shipping is not None:
            self._shipping.rollouts.fleet_changed()

    async def _open_link_port(self) -> None:
        """Open before the gateway announces itself: a device dials an advertised address at once."""
        if self.dialled_in is not None:
            server = link_port(self.dialled_in, self.config, self.tls, self.guard, self._limits["link"])
            self.addresses["link"] = await self._stack.enter_async_context(server)

    def _knows(self, target_id: str) -> bool:
        return self.register is None or self.register.knows(TargetId.parse(target_id).name)

    async def _open_grpc_server(self) -> grpc.aio.Server:
        config = self.config
        opened = await self._stack.enter_async_context(
            open_grpc_server(
                self.add_services,
                config.host,
                config.grpc_port,
                max_message_bytes=config.max_body_bytes + ROOM_BYTES,
                grace_s=CLOSE_GRACE_S,
                secured=self._secured,
                limits=self._limits["grpc"],
            )
        )
        await opened.server.start()
        self.addresses["grpc"] = opened.address
        return opened.server

    def add_services(self, server: grpc.aio.Server) -> None:
        """Add every method of the gRPC port to a server."""
        self._oip_over_grpc.add_to(server)

    def _oip_service(self) -> OipService:
        return OipService(
            self.host,
            max_message_bytes=self.config.max_body_bytes + ROOM_BYTES,
            on_refused=self.metrics.refused,
            guard=self._entry,
            limits=self.config.limits.content,
            held=self._held,
            texts=self.texts,
        )

    async def _open_http_servers(self) -> None:
        config, oip = self.config, self._oip_routes()
        await self._open_http_server(
            "http",
            config.host,
            config.http_port,
            self.inference_routes(oip),
            middlewares=[error_middleware],
            ahead=oip.ahead_of,
            drain=self._http_drains[0],
        )
        rights = require_right(self.guard, self.audit, "metrics") if config.metrics_credentials else []
        host, port = config.metrics_host or config.host, config.metrics_port
        await self._open_http_server("metrics", host, port, self.telemetry.routes(), middlewares=rights)
        await self._open_http_server(
            "admin",
            config.admin_host,
            config.admin_port,
            [
                *operator_routes(
                    name=config.name,
                    fleet=self.fleet,
                    catalog=self.catalog,
                    dispatcher=self.dispatcher,
                    directory=self.directory,
                    broker_rights=self.broker_rights,
                    admission=self.admission,
                    watch=self.watch,
                    policy=config.policy,
                    rollouts=lambda: self._shipping.rollouts.all.values() if self._shipping else (),
                    trials=self.trials,
                    others=self._other_conditions,
                ),
                *(self._shipping.admin_routes() if self._shipping is not None else ()),
                *(self.ingest_service.routes() if self.ingest_service is not None and config.mqtt else ()),
                *trial_routes(self.trials),
            ],
            middlewares=admin_middlewares(config, self.guard, self.audit, self.operator_token),
            drain=self._http_drains[1],
        )
        if self.guard is None:
            await self._publish_operator_token()

    def _other_conditions(self, now: float) -> list[OtherCondition]:
        cost = self.telemetry.loop_lag.cost
        return [*name_conditions(self.claims, now), *loop_conditions(self.config.name, cost)]

    async def _publish_operator_token(self) -> None:
        port, token = port_of(self.addresses["admin"]), self.operator_token
        self._stack.callback(token.withdraw)
        named = self.config.admin_token_file
        try:
            await asyncio.to_thread(token.publish, port, named)
        except OSError as error:
            if named is not None:
                raise StartError(f"cannot write {named} (key 'admin_token_file'): {error.strerror or error}") from error
            log.warning(
                "changes over the admin port are refused: there is no folder for the operator's token",
                reason=str(error),
                way_out="set admin_token_file, or auth",
            )

    def _oip_routes(self) -> OipRoutes:
        return OipRoutes(
            self.host,
            max_body_bytes=self.config.max_body_bytes,
            on_refused=self.metrics.refused,
            guard=self._entry,
            limits=self.config.limits.content,
            body_limits=self.config.limits.body,
            held=self._held,
            texts=self.texts,
        )

    def inference_routes(self, oip: OipRoutes | None = None) -> list[web.RouteDef]:
        """Every route of the inference port."""
        openai = openai_routes(
            self.host,
            self.tokenizers,
            max_body_bytes=self.config.max_body_bytes,
            on_refused=self.metrics.refused,
            guard=self._entry,
            limits=self.config.limits.content,
            body_limits=self.config.limits.body,
            held=self._held,
            usage=self.metrics.generative,
            texts=self.texts,
        )
        return [*(oip or self._oip_routes()).table(), *openai, *openapi_routes()]

    async def _open_http_server(
        self,
        name: str,
        host: str,
        port: int,
        routes: Iterable[web.AbstractRouteDef],
        *,
        middlewares: Iterable[Middleware] = (),
        ahead: Callable[[Entrance], Entrance] | None = None,
        drain: HttpDrain | None = None,
    ) -> None:
        server = open_http_server(
            routes,
            host,
            port,
            key=f"{name}_port",
            max_body_bytes=self.config.max_body_bytes,
            grace_s=CLOSE_GRACE_S,
            middlewares=middlewares,
            ahead=ahead,
            secured=self._secured,
            limits=self._limits["http" if name == "http" else "operators"],
            drain=drain,
            connections=None if name == "http" else self._operators,
            allowed_origins=() if name == "admin" else self.config.allowed_origins,
        )
        self.addresses[name] = await self._stack.enter_async_context(server)

    def _dialler_of(self, spec: TargetSpec) -> Dialler:
        """Over TLS a target of our own must prove its id; a foreign one, the host at which it is called."""
        if self.tls is None or not spec.encrypted:
            return PlainDialler()
        return self.tls.dialler(None if spec.foreign else CertificateIdentity.parse(spec.id))

    def _default_budget_s(self, request: InferRequest) -> float:
        return self.defaults.manifest(request.model_name, request.model_version).default_budget_s

    def _version_of(self, request: InferRequest) -> str:
        return self.defaults.manifest(request.model_name, request.model_version).version

    def __repr__(self) -> str:
        return f"<Gateway {self.config.name} {self.addresses} {self.fleet!r}>"


def _port_groups(config: GatewayConfig) -> tuple[PortGroup, ...]:
    return ("http", "grpc", "operators") if config.link_port is None else ("http", "grpc", "operators", "link")


def _verifier_of(config: GatewayConfig, tls: Tls | None, draw: Callable[[], float]) -> AttestationVerifier | None:
    section = config.attestation
    if section is None or tls is None:
        return None
    measurements = frozenset(section.measurements)
    return AttestationVerifier(section.allowed, tls, measurements=measurements, max_age_s=section.max_age_s, draw=draw)


async def serve(config: GatewayConfig) -> None:
    """Run a gateway until cancelled, and say on stdout when it is ready."""
    raise_file_limit()  # before the servers compute their connection limits
    async with Gateway(config) as gateway:
        await gateway.static_targets_tried(STATIC_TARGETS_WITHIN_S)
        _settle_garbage_collector()
        models = sorted({manifest.name for manifest in gateway.catalog.manifests})
        if gateway.guard is None:
            say = log.info if is_loopback(config.host) else log.warning
            say("serving without authentication: any or no API key works", **gateway.addresses)
        else:
            log.info("serving those who show a credential", guard=repr(gateway.guard), **gateway.addresses)
        events.emit("ready", role="gateway", name=config.name, addresses=gateway.addresses, models=models)
        try:
            await asyncio.Event().wait()
        finally:
            log.info("stopping")


def _settle_garbage_collector() -> None:
    """Exempt what the start made from collection, and collect the rest rarely: pauses are jitter."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)

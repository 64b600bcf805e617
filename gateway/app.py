"""The composition root: a gateway's parts are made and connected here, in the order of their dependencies.

`async with Gateway(config)` starts a gateway, in a test as in a process: targets first, so that links are dialled while
the servers are being opened, servers last. Closing goes backwards, within `drain_s` plus a moment (`drain.py`), so that
requests under way are answered before their targets are closed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import grpc
import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.catalog import Catalog
from gateway.config.artifacts import ArtifactsConfig
from gateway.config.gateway import GatewayConfig
from gateway.core.access.broker_rights import BrokerRights
from gateway.core.access.sequence_home import SequenceHomes
from gateway.core.admission.leased_quotas import LeasedQuotas
from gateway.core.admission.quarantine import Quarantine
from gateway.core.admission.shared_quotas import SharedQuotas
from gateway.core.admission.token_forecast import TokenForecast
from gateway.core.agreement.agreement_watch import AgreementTurn, AgreementWatch, AnswerSource
from gateway.core.agreement.shadow_budget import ShadowBudget
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.found_targets import FoundTargets
from gateway.core.fleet.link_events import LinkEvent
from gateway.core.fleet.name_claims import NameClaims
from gateway.core.fleet.scaling import ReplicaScaler
from gateway.core.fleet.target import TargetSpec
from gateway.core.history.recorder import FlightRecorder
from gateway.core.peers.peers import PeerReport, Peers
from gateway.core.peers.siblings import Siblings
from gateway.core.response_cache.response_cache import ResponseCache
from gateway.default_versions import DefaultVersions
from gateway.delivery.artifacts.store import ArtifactStore
from gateway.delivery.rollouts.conductor_lease import ConductorLease
from gateway.delivery.service import DeliveryService
from gateway.delivery.trials import Trials
from gateway.discovery.discovery import Discovery
from gateway.drain import CLOSE_GRACE_S, GatewayDrain
from gateway.fleet_sync.peer_exchange import PeerExchange, needs_of_others
from gateway.fleet_sync.registry import FleetRegister
from gateway.fleet_sync.sync import MAX_INBOX, FleetSync
from gateway.help.help_service import HelpService
from gateway.host import GatewayHost
from gateway.http.openapi import openapi_routes
from gateway.identity.audit import Audit
from gateway.identity.guard import GatewayGuard
from gateway.ingest.service import IngestService
from gateway.layers.admit import admit
from gateway.layers.authenticate import authenticate
from gateway.layers.cached import cached
from gateway.layers.expire import expire
from gateway.layers.fallback_model import fallback_model
from gateway.layers.from_gateway import from_gateway
from gateway.layers.observe import observe
from gateway.layers.quarantine import QuarantineListener, quarantine
from gateway.layers.shadow import shadow
from gateway.layers.split import split
from gateway.layers.stack import Layer, Service, stack
from gateway.layers.unloaded import unloaded
from gateway.layers.versions import versions
from gateway.link_port import advertised_dial_address, dial_in_server_of, link_port
from gateway.model_control import CatalogLoader, GatewayControlAccess
from gateway.observe.conditions import (
    OtherCondition,
    discovery_conditions,
    loop_conditions,
    name_conditions,
    store_conditions,
)
from gateway.observe.unknown_versions import UnknownVersions
from gateway.operate.admin_routes import admin_middlewares, operator_routes, require_right
from gateway.operate.agreement_report import agreement_families, agreement_routes, drift_conditions
from gateway.operate.cache_report import cache_families, cache_json
from gateway.operate.configuration_report import (
    configuration_conditions,
    configuration_families,
    configuration_json,
    file_conditions,
)
from gateway.operate.console.history import ConsoleHistory
from gateway.operate.help_report import help_families, help_json
from gateway.operate.model_routes import model_routes
from gateway.operate.trial_report import trial_families
from gateway.operate.trial_routes import trial_routes
from gateway.placement_stack import admission_of, crowd_draw_of, handovers_of, placement_of, policy_of
from gateway.serving.disagreements import Disagreements
from gateway.serving.dispatcher import Dispatcher
from gateway.serving.known_answers import CacheTerms, KnownAnswers
from gateway.serving.layer_splitting import LayerSplitting
from gateway.serving.shadowing import Shadowing, ShadowTerms
from gateway.site_port import site_port, site_service_of
from gateway.store.quota_leaser import QuotaLeaser
from gateway.store.shared_store import SharedStore
from gateway.targets.accepted_link import AcceptedLink
from gateway.targets.attestation_verifier import AttestationVerifier
from gateway.targets.condition_log import HealthLog, log_condition, log_name_conflict
from gateway.targets.directory import Directory
from gateway.targets.openai.target import OpenAITarget
from gateway.telemetry import Telemetry, run_soon
from gateway.workers.broker_relay import BrokerRelay, RelayedBroker
from gateway.workers.keeper_side import KeeperSide
from gateway.workers.process_part import ProcessPart, WorkerWord
from gateway.workers.relayed_links import RelayedLinks
from gateway.workers.worker_side import WorkerSide
from tidegate import clock
from tidegate.caller import tenant_of
from tidegate.config import ConfigError
from tidegate.fleet.topics import Topics
from tidegate.generate.text.text_models import TextModels
from tidegate.link.client import ROOM_BYTES
from tidegate.link.service import LinkService
from tidegate.models.generative import Generative
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository, RepositoryError
from tidegate.models.share_weights import ShareWeights
from tidegate.mqtt.link import LinkEvent as BrokerEvent
from tidegate.mqtt.link import MqttLink
from tidegate.oip.body_budget import BodyMemory
from tidegate.oip.grpc.server import OipService
from tidegate.oip.guard import DrainingGuard, OpenGuard
from tidegate.oip.http.server import OipRoutes, error_middleware
from tidegate.oip.repository.model_control import FixedControl
from tidegate.openai.routes import openai_routes
from tidegate.openai.tokens import Tokenizers
from tidegate.outcome import ModelNotFound
from tidegate.runtime import events
from tidegate.runtime.logs import configure_logging
from tidegate.runtime.process import StartError
from tidegate.runtime.settled_imports import settle_collector
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.tls import Dialler, PlainDialler, Tls, check_encrypted, tls_of
from tidegate.servers.address import is_loopback, port_of
from tidegate.servers.grpc_server import open_grpc_server
from tidegate.servers.handed_sockets import HandedSockets, connections_on, stop_listening
from tidegate.servers.http_drain import HttpDrain
from tidegate.servers.http_server import Entrance, connection_table, open_http_server
from tidegate.servers.limits import PortGroup, limits_by_port, raise_file_limit
from tidegate.servers.operator_token import OperatorToken
from tidegate.servers.role_guard import ServerSecurity
from tidegate.serving.repository_control import RepositoryControl
from tidegate.types import Call, InferRequest, TargetId

log = structlog.get_logger(__name__)

STATIC_TARGETS_WITHIN_S = 5.0
LEAVES_WITHIN_S = 25.0  # connections of a worker with a successor have so long to end, each with an answer
LOOKS_EVERY_S = 0.1
TARGETS_WITHIN_S = 5.0  # a worker that starts beside others waits so long for its links before it has callers
TARGETS_COME_S = 1.0  # devices that MQTT shows are known within this after one another


class Gateway:
    """One gateway. `async with` starts and stops it; `addresses` says where it answers."""

    def __init__(
        self, config: GatewayConfig, *, draw: Callable[[], float] = random.random, part: ProcessPart | None = None
    ) -> None:
        """Args: part: which process of a gateway with several this is (`gateway/workers`); None: it has one."""
        self._part = part
        self._relayed = _relayed_of(config, part)
        self.config = config if part is None else part.config_of(config)
        self._draw = draw
        self.addresses: dict[str, str] = {}
        self._quarantine = Quarantine()
        self._scaling = ReplicaScaler(self.config.scaling.spec)
        # Each step uses what those before it made.
        self._make_identity()
        self._make_models()
        self._make_fleet()
        self._make_neighbours()
        self._make_targets()
        self._make_dispatcher()
        self._make_telemetry()
        self._make_beside_dispatcher()
        self._make_services()
        self._make_access()
        self._make_ports()
        self._make_processes()
        self._handed_over = False
        self._shipping: DeliveryService | None = None  # once there is a broker to reach devices by
        self._stack = AsyncExitStack()
        self._connect_observers()

    def _make_identity(self) -> None:
        """The gateway's identity on its connections, and what it believes of devices."""
        config = self.config
        self.tls = tls_of(config.tls, lambda: CertificateIdentity("gateway", config.name))
        check_encrypted(config.mqtt, self.tls)
        self._secured = ServerSecurity(self.tls) if self.tls else None  # any caller: the layers check its identity
        self.verifier = _verifier_of(config, self.tls, self._draw)

    def _make_models(self) -> None:
        """The models of the repository, and what reads their texts."""
        config = self.config
        # Without a folder it is never asked for one.
        self.repository = Repository(config.model_repository or Path(), pass_over=True)
        self.catalog = Catalog(self.repository.manifests() if config.model_repository else ())
        for (name, version), why in self.repository.damaged.items():
            log.error("a version cannot be read, and others stand in", model=name, version=version, reason=why)
        self.tokenizers = Tokenizers(self.repository)
        shipped = ArtifactStore(config.artifacts.folder).path if config.artifacts is not None else None
        self.texts = TextModels(self.repository, shipped)
        self._loader = CatalogLoader(config.model_repository or Path(), self.catalog, self._model_came)

    def _make_fleet(self) -> None:
        """The fleet as it is folded from what devices and pools say."""
        config, draw = self.config, self._draw
        self.fleet = Fleet(self.catalog.feature_of, draw=draw, scaling=self._scaling)
        self.defaults = DefaultVersions(self.catalog, self.fleet)
        self._unknown_versions = UnknownVersions(self.fleet, self.catalog)
        self.claims = NameClaims()  # of devices' names, over MQTT as on streams that they dial
        self.register = FleetRegister(Topics(config.fleet), draw=draw, claims=self.claims) if config.mqtt else None
        self.broker_rights = BrokerRights(config.fleet, config.name)

    def _make_neighbours(self) -> None:
        """The gateways beside this one, and the store that they share."""
        config = self.config
        self.peers = Peers(config.name, config.gateways)
        self._siblings = Siblings() if self._part is None else self._part.siblings
        self.store = SharedStore(config.store, config.fleet, self._draw) if config.store else None

    def _make_targets(self) -> None:
        """The targets that are configured, found or dial in, and the links to them."""
        config, draw = self.config, self._draw
        self.dialled_in = dial_in_server_of(config, self.tls, self._knows, self.claims)
        static, sources = [one.spec for one in config.targets], [one.label for one in config.discovery]
        self.found = FoundTargets(static, sources, drain_s=config.drain_s)
        self.directory = Directory(
            self.fleet,
            self.catalog,
            self.found,
            gateway_name=config.name,
            edge_transport=config.edge_transport,
            max_message_bytes=config.max_body_bytes + ROOM_BYTES,
            draw=draw,
            dialler_of=self._dialler_of,
            networks=config.networks,
            verifier=self.verifier,
            dialled_in=self.dialled_in or self._relayed,
            make_openai=self._openai_target,
            register=self.register,
        )
        self.discovery = Discovery(
            config.discovery,
            self.found,
            self.directory.found_changed,
            draw,
            has_tls=config.tls is not None,
            networks=config.networks,
        )

    def _make_dispatcher(self) -> None:
        """What admits a request, and what places and drives it."""
        config, draw = self.config, self._draw
        self.admission = admission_of(config, self.fleet, draw)
        self._shares = ShareWeights(config.shares)
        placer, hedges = policy_of(config, self.fleet, draw, self.admission.overloaded)
        self.dispatcher = Dispatcher(
            placer,
            self.directory.targets,
            self.defaults.manifest,
            draw=draw,
            memory=FlightRecorder(config.remember_decisions, config.remember_bytes, run=token_hex(3), defer=run_soon),
            hedges=hedges,
            handovers=handovers_of(config, placer, hedges, self._strained),
            overloaded=self._strained,
            placement=placement_of(placer, self.fleet, self.admission, draw, self._strained),
            weight_of=self.admission.weight_of,
            shares=self._shares,
            listener=QuarantineListener(self._quarantine, clock.now),
            homes=_homes_of(config),
        )

    def _make_telemetry(self) -> None:
        """What operators see: console, metrics, traces, conditions."""
        self.watch = ConsoleHistory(self.fleet, self._all_in_flight, self._generates) if self.config.console else None
        self.telemetry = Telemetry(
            self.config,
            self.dispatcher,
            self.admission,
            self._quarantine,
            self._version_of,
            self._scaling,
            console=self.watch,
            others=self._other_conditions,
            tls=self.tls,
            needs=partial(needs_of_others, self.peers, self._siblings),
        )
        self.metrics = self.telemetry.metrics

    def _make_beside_dispatcher(self) -> None:
        """What the layers ask beside the dispatcher, each with its families of metrics."""
        self.trials = Trials(self.config.trials_file, self.defaults, self._draw, self._strained, self.dispatcher.infer)
        self.metrics.add(lambda: trial_families(self.trials))
        self.shadowing = self._new_shadowing()
        if (shadowing := self.shadowing) is not None:
            self.metrics.add(lambda: agreement_families(shadowing))
        self.known_answers = self._new_known_answers()
        if (known := self.known_answers) is not None:
            self.metrics.add(lambda: cache_families(known))

    def _make_services(self) -> None:
        """What answers requests: of callers, of other gateways, of devices, and deferred ones."""
        config = self.config
        behind, infer, relayed, helped = self._line()
        self.ingest_service = (
            IngestService(config.ingest, config.name, behind, self.defaults.manifest, self.store)
            if config.ingest
            else None
        )
        self.host = self._host_of(infer)
        self.upstreams: LinkService | None = None  # the streams of gateways that have this one as a site
        if config.site_port is not None:
            in_flight = lambda: self.admission.in_flight  # noqa: E731
            self.upstreams = site_service_of(config, self._host_of(relayed), self.fleet, in_flight)
        self.audit = Audit()
        self.guard = GatewayGuard(config.auth, self.host, self.admission, self.audit) if config.auth else None
        self.help = self._new_help(helped)
        if (asked := self.help) is not None:
            self.metrics.add(lambda: help_families(asked.askers))

    def _make_access(self) -> None:
        """The protocols that are spoken here, and what guards them."""
        self.operator_token = OperatorToken()  # for changes over the admin port, where `auth` does not guard it
        self._entry = DrainingGuard(self.guard or OpenGuard(self.host), self.host.server_name)
        self._control = self._model_control()
        self._held = BodyMemory(self.config.limits.max_held_bytes)
        self._oip_over_grpc = self._oip_service()

    def _make_ports(self) -> None:
        """What the ports hold of connections, before any is open."""
        self._limits = limits_by_port(self.config.limits.door, _port_groups(self.config))
        self._operators = connection_table(self._limits["operators"])  # of the ports for metrics, operators and models
        self._http_drains = HttpDrain(), HttpDrain()  # of the inference port, and of the operators'

    def _make_processes(self) -> None:
        """This process's side of the others, where a gateway has several."""
        part = self._part
        self._keeper = self._keeper_side() if part is not None and part.is_keeper else None
        self._worker = self._worker_side(part) if part is not None and not part.is_keeper else None

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
        if self._relayed is not None:
            self._relayed.on_in, self._relayed.on_left = self.directory.dialled, self.directory.hung_up
        if self._keeper is not None:
            self._connect_keeper(self._keeper)
        # Of a device whose answers drift, those that are kept are forgotten.
        if self.shadowing is not None and (known := self.known_answers) is not None:

            def turned(turn: AgreementTurn) -> None:
                if turn.turn != "returned":
                    known.distrust(*turn.source)

            self.shadowing.on_turn = turned
        # The keeper's console shows what the workers' count.
        if self._worker is not None and self.watch is not None:
            self.watch.on_counts = self._worker.counted
        # A scrape has the recorder pack its records first, and the metrics count each record that is packed.
        recorder, telemetry = self.dispatcher.recorder, self.telemetry
        recorder.taps.append(telemetry.metrics.landed)
        if telemetry.trace_sampler is not None:
            recorder.watchers.append(telemetry.trace_sampler.landed)
        # The exposition merges what other processes share, and its own families are shared with them.
        if telemetry.sharing is not None:
            telemetry.sharing.own = telemetry.exposition.own

    def _connect_keeper(self, keeper: KeeperSide) -> None:
        """What workers must know is told to them when it changes, and their counts are read with the keeper's."""
        self.trials.on_change = keeper.tell
        self.metrics.add(keeper.overview.families)
        if self.dialled_in is not None:
            came, went = self.directory.dialled, self.directory.hung_up

            def dialled(link: AcceptedLink) -> None:
                came(link)
                keeper.tell()

            def hung_up(link: AcceptedLink) -> None:
                went(link)
                keeper.left(link)

            self.dialled_in.on_in, self.dialled_in.on_left = dialled, hung_up

    def _keeper_side(self) -> KeeperSide:
        assert self._part is not None
        return KeeperSide(
            self._part,
            self.trials,
            self.watch,
            self.dialled_in.links if self.dialled_in is not None else None,
            self.defaults.manifest,
            lambda: self.catalog.shipped,
            max_message_bytes=self.config.max_body_bytes + ROOM_BYTES,
        )

    def _worker_side(self, part: ProcessPart) -> WorkerSide:
        return WorkerSide(part, self.trials, self._relayed, lambda: self._worker_word(part), self._take_shipped)

    def _take_shipped(self, manifest: Manifest) -> None:
        if manifest not in self.catalog.shipped:
            self.catalog.ship((manifest,))
            self.fleet.repriced()

    def _worker_word(self, part: ProcessPart) -> WorkerWord:
        """What operators see of this worker at the keeper's ports."""
        admission, targets = self.admission, self.fleet.targets.values()
        return WorkerWord(
            admin=str(part.admin_path),
            in_flight=admission.in_flight,
            limit=float(admission.limit.limit),
            overloaded=admission.overload.on,
            shed=sum(admission.refused.values()),
            connections=self._http_drains[0].connections,
            answered=self.metrics.requests.total,
            by_target={one.id: one.queue_estimate.in_flight for one in targets if one.queue_estimate.in_flight},
        )

    def _all_in_flight(self) -> int:
        """The requests in flight here and, for a keeper, at its workers."""
        elsewhere = self._keeper.overview.in_flight if self._keeper is not None else 0
        return self.admission.in_flight + elsewhere

    def _strained(self) -> bool:
        """Whether what is done beside the requests had better wait."""
        return self.admission.overloaded() or self.fleet.balance.panic

    def _host_of(self, infer: Service) -> GatewayHost:
        config, unloaded_here = self.config, self._loader.unloaded
        return GatewayHost(config.name, self.defaults, self.fleet, self.metrics, infer, unloaded_here)

    def _new_shadowing(self) -> Shadowing | None:
        """What compares devices' answers with the pool's; None where that is off."""
        section = self.config.agreement
        if section is None:
            return None
        return Shadowing(
            ShadowTerms(section.share, section.tolerance, self._forbids_shadows),
            AgreementWatch(section.every_s),
            ShadowBudget(section.pool_share),
            Disagreements(section.remember, section.inputs_folder, section.inputs_bytes),
            placer=self.dispatcher.placer,
            targets=self.directory.targets,
            manifest_of=self.defaults.manifest,
            ask_builder=self.dispatcher.ask_builder,
            draw=self._draw,
            strained=self._strained,
        )

    def _new_known_answers(self) -> KnownAnswers | None:
        """What answers requests from memory; None where no cache is configured."""
        section = self.config.cache
        if section is None:
            return None
        for manifest in self.catalog.manifests:
            if manifest.name in section.models and not manifest.cacheable:
                log.warning(
                    "answers are not kept, since the manifest says cacheable: false",
                    model=manifest.name,
                    version=manifest.version,
                )
        watch = None if self.shadowing is None else self.shadowing.watch
        return KnownAnswers(
            ResponseCache(section.max_bytes, section.limits),
            CacheTerms(section.max_input_bytes, section.share_tenants),
            self.defaults,
            self.dispatcher.recorder,
            demanded=self.trials.demanded,
            on_trial=self.trials.watches,
            is_drifting=lambda *source: watch is not None and AnswerSource(*source) in watch.drifting,
        )

    def _new_help(self, infer: Service) -> HelpService | None:
        """What answers requests that devices ask help for; None where devices get none."""
        section, config = self.config.help, self.config
        if section is None:
            return None
        assert self.dialled_in is not None, "the configuration asks for link_port"
        return HelpService(
            self._host_of(infer),
            self.admission,
            self.dialled_in,
            gateway_name=config.name,
            grant_of=section.grant_of,
            known=self._knows,
            identify=None if self.guard is None else self.guard.identify,
            max_in_flight=section.max_in_flight_per_device,
            max_streams=config.max_dialled_in,
            max_body_bytes=config.max_body_bytes,
            limits=config.limits.content,
        )

    def _forbids_shadows(self, tenant: str) -> bool:
        tenants = self.config.tenants
        section = tenants.get(tenant_of(tenant)) or tenants.get("default")
        return section is not None and not section.shadow

    def _line(self) -> tuple[Service, Service, Service, Service]:
        """The services for deferred requests, callers', other gateways' and devices', with layers, outermost first."""
        shadows = [] if self.shadowing is None else [shadow(self.shadowing)]
        known = [] if self.known_answers is None else [cached(self.known_answers)]
        behind = stack(  # a deferred request has no caller: no layer counts live traffic or authenticates
            *self._unloaded(),  # first: it is not served here, whoever calls
            expire(clock.now, self._default_budget_s),  # fixes the deadline, once
            quarantine(self._quarantine, clock.now),  # before admit: a call that is refused here takes no place
            *known,  # before admit: a known answer takes no place; after authenticate: it is its tenant's
            admit(self.admission, clock.now, self._share_of),  # after expire: nothing late takes a place
            *self._fallback_models(),  # inside of admit: one place for both; outside of versions: it has its own
            versions(self.defaults, clock.now, self._draw, self.trials),  # where there are two
            *shadows,  # after versions: what is compared is the answer of one version
            *self._splits(),  # after both: each half is a request of its own, which they do not see
            inner=self.dispatcher.infer,  # drives gateway/core/request/machine.py: places, launches, hedges, falls back
        )
        called = stack(
            *self.telemetry.layers,  # traces: whatever is counted or logged further in can name its trace
            observe(clock.now, *self.telemetry.observers),  # outermost: sees every outcome, also of the layers below
            authenticate(self.admission, clock.now, self._tokens_of),  # the identity of the call, and its rights
            inner=behind,
        )
        relayed = stack(
            *self.telemetry.layers,
            observe(clock.now, *self.telemetry.observers),
            from_gateway(self.config.name, clock.now),  # instead of authenticate, which was done where the caller asked
            inner=behind,
        )
        helped = stack(
            *self.telemetry.layers,
            observe(clock.now, *self.telemetry.observers),
            from_gateway(self.config.name, clock.now),  # the device, too, knows a queue and a compute
            authenticate(self.admission, clock.now, self._tokens_of),  # as of a caller: the device's rights and quotas
            inner=behind,
        )
        return behind, called, relayed, helped

    def _fallback_models(self) -> list[Layer]:
        named = any(one.fallback_model for one in self.catalog.manifests)
        if not named and self.config.model_control == "none":  # else one may come while it runs
            return []
        return [fallback_model(self.defaults.manifest, clock.now, self.trials.demanded)]

    def _splits(self) -> list[Layer]:
        if not any(one.split for one in self.catalog.manifests) and self.config.model_control == "none":
            return []
        dispatcher = self.dispatcher
        splitting = LayerSplitting(
            self.defaults.manifest, dispatcher.placer, dispatcher.ask_builder, dispatcher.left_out
        )
        self.metrics.add(splitting.families)
        return [split(splitting)]

    def _unloaded(self) -> list[Layer]:
        if self.config.model_control == "none":
            return []
        return [unloaded(self._loader.unloaded, self.config.name)]

    def _model_control(self) -> RepositoryControl | None:
        config = self.config
        if config.model_control == "none":
            return None
        if config.model_repository is None:
            raise StartError(f"key 'model_control': {config.model_control} needs a model_repository to load from")
        return RepositoryControl(
            self.host.server_name,
            config.model_repository,
            self._loader,
            mode=config.model_control,
            poll_s=config.repository_poll_s,
        )

    def _control_access(self) -> GatewayControlAccess | None:
        if self._control is None:
            return None
        return GatewayControlAccess(self._control, self.guard, self.operator_token, self.audit)

    async def _model_came(self, manifest: Manifest) -> None:
        await self.tokenizers.load([manifest])
        await self.texts.load([manifest])

    def _share_of(self, request: InferRequest) -> float:
        """The weight of the request's model."""
        return self._shares.of(self.defaults.manifest(request.model_name, request.model_version))

    def _generative_of(self, request: InferRequest) -> Generative | None:
        """What is said of the request's model, if it generates; None of one that is not known."""
        try:
            return self.defaults.manifest(request.model_name, request.model_version).generative
        except ModelNotFound:
            return None

    def _generates(self, request: InferRequest) -> bool:
        return self._generative_of(request) is not None

    def _tokens_of(self, call: Call) -> TokenForecast | None:
        """The tokens of a call whose model generates; None of one that is not known."""
        try:
            return self.dispatcher.ask_builder.token_forecast(call)
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

    async def _targets_found(self, within_s: float) -> None:
        """Wait until each target that is known now was reached or found unreachable, and none has come for a while."""
        pause_s = TARGETS_COME_S if self.config.mqtt or self.config.discovery else 0.0
        give_up_at, since, known = clock.now() + within_s, clock.now(), 0
        while clock.now() < give_up_at:
            if len(self.fleet.targets) != known or not self.directory.settled:
                since, known = clock.now(), len(self.fleet.targets)
            elif clock.now() - since >= pause_s:
                return
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
        await self._stack.enter_async_context(self.discovery)
        await self._stack.enter_async_context(self.trials)
        if self.shadowing is not None:  # after the directory: its targets are asked
            await self._stack.enter_async_context(self.shadowing)
        for side in (self._keeper, self._worker):
            if side is not None:
                await self._stack.enter_async_context(side)
        await self._open_link_port()
        if self.upstreams is not None:
            port = site_port(self.upstreams, self.config, self.tls, self._limits["link"])
            self.addresses["site"] = await self._stack.enter_async_context(port)
        if self.store is not None:
            await self._stack.enter_async_context(self.store)
        if self.config.mqtt:
            await self._follow_fleet(self.config.mqtt)
        elif self.config.gateways > 1 or self._part is not None or self.store is not None:
            await self._share_with_peers(lambda _report: False)
        await self.tokenizers.load(self.catalog.manifests)  # before the servers: no caller waits for it
        self._stack.push_async_callback(self.texts.aclose)
        await self.texts.load(self.catalog.manifests)
        await self.texts.start_rendering()
        if self._control is not None:
            await self._stack.enter_async_context(self._control)
        if self.watch is not None:
            await self._stack.enter_async_context(self.watch)
        if self._worker is not None:
            await self._targets_found(TARGETS_WITHIN_S)  # another worker has the callers until then
        server = await self._open_grpc_server() if self._keeper is None else None
        await self._open_http_servers()
        streams = [self.upstreams, None if self.help is None else self.help.links]
        drain = GatewayDrain(
            self.host,
            self._entry,
            self._oip_over_grpc,
            server,
            self._http_drains,
            [one for one in streams if one is not None],
        )
        self._stack.push_async_callback(drain.run, self.config.drain_s, refuses=lambda: not self._handed_over)

    async def hand_over(self, within_s: float) -> None:
        """Leave new connections to a successor, and wait that the open ones end, each with its next answer."""
        assert self._part is not None, "a gateway of one process has no successor"
        self._handed_over = True
        grpc_port, http = self._part.part.grpc_port, self._http_drains[0]
        self._part.handed.close()
        stop_listening(grpc_port)  # gRPC cannot be told: its server accepts for as long as it answers
        http.begin()
        give_up_at = clock.now() + within_s
        while (http.connections or connections_on(grpc_port)) and clock.now() < give_up_at:
            await clock.sleep(LOOKS_EVERY_S)

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
            peers=self.peers,
            pools=self.discovery.announced,
            listening=self._relayed_broker(url) if self._worker is not None else None,
            on_event=await self._relay_broker() if self._keeper is not None else lambda _: None,
        )
        if ingest is not None:  # the second phase again: messages come in by the sync, and receipts leave by it
            ingest.send = sync.send_receipt
        await self._stack.enter_async_context(sync)
        await self._share_with_peers(sync.publish_report if self._worker is None else lambda _report: False)
        if self.config.artifacts is not None:
            await self._ship(self.config.artifacts, sync)

    def _relayed_broker(self, url: str) -> Callable[[Callable[[], None]], MqttLink]:
        """A worker hears the broker by way of the keeper."""
        assert self._part is not None
        by_way_of = partial(RelayedBroker, self._part.broker_path, url, draw=self._draw, max_inbox=MAX_INBOX)
        return lambda on_activity: by_way_of(on_activity=on_activity)

    async def _relay_broker(self) -> Callable[[BrokerEvent], None]:
        """The keeper passes on to the workers what it hears."""
        assert self._part is not None
        relay = BrokerRelay(Topics(self.config.fleet))
        await self._stack.enter_async_context(relay.opened(self._part.broker_path))
        return relay.heard

    async def _share_with_peers(self, publish: Callable[[PeerReport], bool]) -> None:
        placer, tenants = self.dispatcher.placer, self.admission.tenants
        shared, leaser = SharedQuotas(tenants), None
        if self.store is not None and self.config.store is not None:
            lease_s = self.config.store.lease_ms / 1e3
            leaser = QuotaLeaser(
                self.store,
                self.config.name if self._part is None else f"{self.config.name}/{self._part.name}",
                self.peers,
                LeasedQuotas(tenants, shared, lease_s),
                placer.cloud_budget,
                lease_s=lease_s,
                draw=self._draw,
            )

        def counted(gateways: int) -> None:
            if self.config.policy == "value":
                placer.share_targets(crowd_draw_of(self.config, self._draw, gateways))

        exchange = PeerExchange(
            self.peers,
            publish,
            counted,
            quotas=shared,
            scaling=self.telemetry.scaling.scaling,
            cloud=placer.cloud_budget,
            siblings=self._siblings,
            tell_siblings=self._part.tell_report if self._part is not None else lambda _report: None,
            leases=leaser is not None,
            spends=(lambda: leaser.spends) if leaser is not None else lambda: None,
        )
        await self._stack.enter_async_context(exchange)
        if leaser is not None:
            await self._stack.enter_async_context(leaser)

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
            lease=ConductorLease(self.store, self.config.name) if self.store is not None else None,
        )
        await self._stack.enter_async_context(self._shipping)
        drift = self._shipping.rollouts.drift
        self.metrics.add(lambda: configuration_families(drift))
        if self._shipping.address:
            self.addresses["artifacts"] = self._shipping.address

    def _fleet_changed(self) -> None:
        self.directory.devices_changed()
        if self._shipping is not None:
            self._shipping.rollouts.fleet_changed()

    async def _open_link_port(self) -> None:
        """Open before the gateway announces itself: a device dials an advertised address at once."""
        if self.dialled_in is not None:
            server = link_port(self.dialled_in, self.config, self.tls, self.guard, self._limits["link"], self.help)
            self.addresses["link"] = await self._stack.enter_async_context(server)

    def _knows(self, target_id: str) -> bool:
        return self.register is None or self.register.knows(TargetId.parse(target_id).name)

    async def _open_grpc_server(self) -> grpc.aio.Server:
        config = self.config
        opened = await self._stack.enter_async_context(
            open_grpc_server(
                self.add_services,
                config.host,
                config.grpc_port if self._part is None else self._part.part.grpc_port,
                max_message_bytes=config.max_body_bytes + ROOM_BYTES,
                grace_s=CLOSE_GRACE_S,
                secured=self._secured,
                limits=self._limits["grpc"],
                shares_port=self._part is not None,
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
            control=self._control_access(),
            limits=self.config.limits.content,
            held=self._held,
            texts=self.texts,
        )

    async def _open_http_servers(self) -> None:
        if self._keeper is None:
            await self._open_inference_port()
        if self._worker is None:
            await self._open_metrics_port()
        await self._open_admin_port()

    async def _open_inference_port(self) -> None:
        config, oip, part = self.config, self._oip_routes(), self._part
        await self._open_http_server(
            "http",
            config.host,
            config.http_port if part is None else part.part.http_port,
            self.inference_routes(oip),
            middlewares=[error_middleware],
            ahead=oip.ahead_of,
            drain=self._http_drains[0],
            handed=None if part is None else part.handed,
        )
        if part is not None:
            await part.handed.accept(part.part.number - 1)

    async def _open_metrics_port(self) -> None:
        config = self.config
        rights = require_right(self.guard, self.audit, "metrics") if config.metrics_credentials else []
        host, port = config.metrics_host or config.host, config.metrics_port
        await self._open_http_server("metrics", host, port, self.telemetry.routes(), middlewares=rights)

    async def _open_admin_port(self) -> None:
        config, overview = self.config, self._keeper.overview if self._keeper is not None else None
        operators, console = operator_routes(
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
            shadowing=self.shadowing,
            others=self._other_conditions,
            peers=self.peers,
            processes=overview,
            admitted=overview.admission if overview is not None else None,
            helped=lambda: help_json(None if self.help is None else self.help.askers),
            cached=lambda: cache_json(self.known_answers if overview is None else None),  # a keeper has no callers
            configured=self._configured,
        )
        if console is not None and self._worker is None:
            await self._stack.enter_async_context(console)
        routes = [
            *operators,
            *(self._shipping.admin_routes() if self._shipping is not None else ()),
            *(self.ingest_service.routes() if self.ingest_service is not None and config.mqtt else ()),
            *trial_routes(self.trials),
            *agreement_routes(self.shadowing),
            *model_routes(self.host, self._control or FixedControl(self.host)),
            *(overview.routes() if overview is not None else ()),
        ]
        if self._worker is not None and self._part is not None:
            # For the keeper's questions: none but this account can enter the folder.
            await self._open_http_server("admin", "localhost", 0, routes, path=self._part.admin_path)
            del self.addresses["admin"]
            return
        await self._open_http_server(
            "admin",
            config.admin_host,
            config.admin_port,
            routes,
            middlewares=admin_middlewares(config, self.guard, self.audit, self.operator_token),
            drain=self._http_drains[1],
        )
        if self.guard is None:
            await self._publish_operator_token()

    def _configured(self, now: float) -> dict[str, Any]:
        return configuration_json(self._shipping.rollouts.drift if self._shipping is not None else None, now)

    def _other_conditions(self, now: float) -> list[OtherCondition]:
        cost = self.telemetry.loop_lag.cost
        of_this = loop_conditions(self.config.name, cost)
        drifts = drift_conditions(self.shadowing.watch) if self.shadowing is not None else []
        return [
            *name_conditions(self.claims, now),
            *discovery_conditions(self.found),
            *store_conditions(self.store),
            *self._unknown_versions.conditions(now),
            *drifts,
            *(configuration_conditions(self._shipping.rollouts.drift, now) if self._shipping is not None else ()),
            *(file_conditions(self.register.refused_files) if self.register is not None else ()),
            *of_this,
        ]

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
            control=self._control_access(),
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
            most_rows=self.dispatcher.most_rows,
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
        handed: HandedSockets | None = None,
        path: Path | None = None,
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
            handed=handed,
            path=path,
        )
        self.addresses[name] = await self._stack.enter_async_context(server)

    def _dialler_of(self, spec: TargetSpec) -> Dialler:
        """Over TLS a target of our own must prove its id; a foreign one, the host at which it is called."""
        if self.tls is None or not spec.encrypted:
            return PlainDialler()
        if spec.tier == "site":
            return self.tls.dialler(CertificateIdentity("gateway", TargetId.parse(spec.id).name))
        return self.tls.dialler(None if spec.foreign else CertificateIdentity.parse(spec.id))

    def _openai_target(self, spec: TargetSpec, on_event: Callable[[LinkEvent], None]) -> OpenAITarget:
        section = next(one.openai for one in self.config.targets if one.spec.id == spec.id)
        assert section is not None
        return OpenAITarget(
            spec.id,
            spec.address,
            section,
            on_event=on_event,
            manifest_of=self.catalog.own,
            text_of=self.texts.of,
        )

    def _default_budget_s(self, request: InferRequest) -> float:
        return self.defaults.manifest(request.model_name, request.model_version).default_budget_s

    def _version_of(self, request: InferRequest) -> str:
        return self.defaults.manifest(request.model_name, request.model_version).version

    def __repr__(self) -> str:
        return f"<Gateway {self.config.name} {self.addresses} {self.fleet!r}>"


def _port_groups(config: GatewayConfig) -> tuple[PortGroup, ...]:
    has_links = config.link_port is not None or config.site_port is not None
    return ("http", "grpc", "operators", "link") if has_links else ("http", "grpc", "operators")


def _relayed_of(config: GatewayConfig, part: ProcessPart | None) -> RelayedLinks | None:
    """A worker's way to devices that dial the keeper."""
    if part is None or part.is_keeper or config.link_port is None:
        return None
    most = config.max_body_bytes + ROOM_BYTES
    return RelayedLinks(part.dial_in_path, gateway_name=config.name, max_message_bytes=most)


def _homes_of(config: GatewayConfig) -> SequenceHomes | None:
    path = config.sequence_home_key
    if path is None:
        return None
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines()]
        return SequenceHomes([line for line in lines if line])
    except OSError as error:
        raise StartError(f"cannot read {path} (key 'sequence_home_key'): {error.strerror or error}") from error
    except ValueError as error:
        raise StartError(f"{path} (key 'sequence_home_key'): {error}") from error


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
        settle_collector()
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


async def serve_part(config: GatewayConfig, parent_fd: int) -> None:
    """Run one process of a gateway with several, until it is cancelled or a successor serves in its place."""
    raise_file_limit()
    part = await ProcessPart.received(parent_fd)
    configure_logging(f"gateway/{config.name} {part.name}", level=config.log_level, form=config.log_format)
    async with part:
        try:
            async with Gateway(config, part=part) as gateway:
                await gateway.static_targets_tried(STATIC_TARGETS_WITHIN_S)
                settle_collector()
                part.serving(gateway.addresses, sorted({manifest.name for manifest in gateway.catalog.manifests}))
                await part.leaving.wait()
                if not part.is_keeper:
                    await gateway.hand_over(LEAVES_WITHIN_S)
        except (ConfigError, RepositoryError, StartError) as error:
            await part.cannot_start(str(error))
            raise

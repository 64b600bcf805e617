"""The edge app puts an edge agent together: what is started in which order, and how it ends.

    store → repository → servers open (not ready) → models load and warm, one after another → the fleet hears → ready

Models warm up one at a time, because each measures what it costs on this device, and two that measure at once would
both report twice the truth. The fleet hears of the device last: a gateway that discovers it may use it at once.

The end runs backwards and within `drain_s` plus a moment: the fleet hears a goodbye first, so that nothing new is
sent; each link stream hears one too; what is under way is answered; then workers, servers and futures end.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
import structlog
from msgspec import to_builtins
from msgspec.structs import replace

from edge_agent.config import EdgeConfig
from edge_agent.configuration.boot import BootConfiguration
from edge_agent.configuration.running_parts import AnswerCounts, RunningParts, changed_by_others
from edge_agent.configuration.service import ConfigurationService
from edge_agent.core.device_conditions import Endurance, absent_in_words
from edge_agent.core.edge_queue import HAND_OVER_AHEAD_S, EdgeQueue
from edge_agent.core.help.help_choice import HelpLimits
from edge_agent.core.help.neighbour_addresses import neighbour_addresses, neighbours_by_mqtt
from edge_agent.core.name_dispute import NameDispute
from edge_agent.core.reporting import AgentState
from edge_agent.delivery.deployment import Deployment
from edge_agent.delivery.documents import TrustedDocuments
from edge_agent.device.memory import MemoryWatch
from edge_agent.device.sensors import Sensors
from edge_agent.device.worker_priority import worker_starter
from edge_agent.fleet.dialling import GatewayDialler, gateway_dialler_of, read_key
from edge_agent.fleet.epoch import EpochStore
from edge_agent.fleet.farewell import forget_farewell, take_farewell
from edge_agent.fleet.sync import EdgeSync
from edge_agent.help.callers_host import CallersGuard
from edge_agent.help.help_lines import HelpLines
from edge_agent.help.helping_host import HelpingHost
from edge_agent.help.mdns import MdnsNeighbours, MdnsScope
from edge_agent.help.neighbour_host import NeighbourAnswers
from edge_agent.help.neighbour_service import NeighbourService
from edge_agent.offline.local_host import LocalHost
from edge_agent.offline.routes import device_routes
from edge_agent.offline.service import OfflineService
from edge_agent.openai import openai_table, text_models_of
from edge_agent.serving.catalogue import CatalogueEntry
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.metrics_port import open_metrics
from edge_agent.serving.model_loader import EdgeModelLoader
from edge_agent.serving.runner import EdgeSequences, Runner
from edge_agent.serving.scheduler import EdgeScheduler
from tidegate import __version__, clock
from tidegate.fleet.conditions import UNTOLD
from tidegate.fleet.messages import Admission, GatewayState
from tidegate.link.attestation_challenge import no_evidence
from tidegate.link.client import ROOM_BYTES
from tidegate.link.frames import Greeting
from tidegate.link.service import LinkService
from tidegate.link.streams import NEIGHBOUR_SERVICE
from tidegate.link.streams import SERVICE as LINK_SERVICE
from tidegate.metrics.generated import GeneratedCounts
from tidegate.metrics.loop_lag import LoopLag
from tidegate.models.fair_share import FairShare
from tidegate.models.share_weights import ShareWeights
from tidegate.oip.body_budget import BodyMemory
from tidegate.oip.grpc.health import HEALTH_SERVICE
from tidegate.oip.grpc.server import OipService
from tidegate.oip.http.server import OipRoutes, error_middleware
from tidegate.rollout.desired import DesiredConfiguration
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import OwnedTask
from tidegate.runtime.process import StartError
from tidegate.security.attestation.attester import Attester, attester_of
from tidegate.security.attestation.measurement import Measurement, measure_process
from tidegate.security.certificate_identity import CertificateIdentity, Role
from tidegate.security.certificate_watch import CertificateWatch
from tidegate.security.tls import Dialler, Tls, check_encrypted, tls_of
from tidegate.servers.grpc_server import open_grpc_server
from tidegate.servers.http_server import open_http_server
from tidegate.servers.limits import PortGroup, limits_by_port
from tidegate.servers.model_control_access import TokenAccess, publish_token
from tidegate.servers.operator_token import OperatorToken
from tidegate.servers.role_guard import ServerSecurity
from tidegate.serving.repository_control import RepositoryControl
from tidegate.tracing.collector import Collector, collector_of
from tidegate.tracing.served import ServedTraces
from tidegate.workers.sandbox_check import check_sandbox, sandbox_gaps, sandbox_parts
from tidegate.workers.warming.device_trial import DeviceTrials
from tidegate.workers.warming.measured_costs import MeasuredCosts
from tidegate.workers.warming.onnx_devices import devices_here
from tidegate.workers.warmup import warm

GATEWAYS: Final[frozenset[Role]] = frozenset({"gateway"})
LOCAL: Final[frozenset[Role]] = frozenset({"gateway", "client"})  # roles that may send a device requests
# `tidegate health` shows the device's own certificate, and learns with it whether the device is ready, and no more.
_NARROWED: Final[dict[str, frozenset[Role]]] = {
    LINK_SERVICE: GATEWAYS,
    HEALTH_SERVICE: LOCAL | {"edge"},
    NEIGHBOUR_SERVICE: frozenset({"edge"}),
}
CLOSE_GRACE_S = 0.2  # what calls that are left get when a server closes, after the drain
SAVE_AGAIN_S: Final = 10.0  # between attempts to write the epoch, while the disk takes nothing
WILDCARDS = ("", "0.0.0.0", "::")
if TYPE_CHECKING:
    from tidegate.generate.text.text_models import TextModels

log = structlog.get_logger(__name__)


class EdgeApp:
    """A whole edge agent, serving inside `async with`.

    Args:
        draw: chance, uniform in [0, 1).
        on_progress: called with words for what a long start is at.
        boot: what was found of settings that are changed from outside, over `config`; None: none are.
    """

    def __init__(
        self,
        config: EdgeConfig,
        *,
        draw: Callable[[], float] = random.random,
        on_progress: Callable[[str], None] = lambda _: None,
        boot: BootConfiguration | None = None,
    ) -> None:
        self.config = config if boot is None else boot.config
        config = self.config
        self._boot_configuration = boot
        self._configuration: ConfigurationService | None = None
        self._queue: EdgeQueue | None = None
        self._counts = AnswerCounts()
        self._held = BodyMemory(config.limits.max_held_bytes)
        self._texts: TextModels | None = None  # of models that generate, for callers in text
        self.addresses: dict[str, str] = {}
        self._draw = draw
        self._on_progress = on_progress
        self._stack = AsyncExitStack()
        self._tls: Tls | None = None
        self._endurance = Endurance(config.min_battery, config.max_temperature_c)
        self._epoch = EpochStore(config.state_dir / "epoch", draw=draw)
        self._saving = OwnedTask(self._save_epoch, name="epoch on disk")
        self._boot, self._began_at = uuid.uuid4().hex[:16], clock.now()
        self._dispute = NameDispute(draw)  # about this device's name, over MQTT as on streams that it dials
        self._host: EdgeHost | None = None
        self._local: LocalHost | None = None
        self._lines: HelpLines | None = None  # to gateways and neighbours that help
        self._neighbours: NeighbourService | None = None  # that this device answers
        self._mdns = self._announcer()
        self._dialling: GatewayDialler | None = None
        self._sensors: Sensors | None = None
        self._memory = MemoryWatch(lambda: self.deployment.serving.runners, draw, busy=lambda: self.host.busy)
        self._scheduler: EdgeScheduler | None = None
        self._link: LinkService | None = None
        self._attester: Attester | None = None
        self._sync: EdgeSync | None = None
        self._deployment: Deployment | None = None
        self._token = OperatorToken()  # for changes of which models are served
        self._control = self._model_control()
        self._costs = _costs_of(config)
        self._devices: tuple[str, ...] = ()  # beside the processor
        self._generated = GeneratedCounts()
        self._loop_lag = LoopLag()
        self.offline = OfflineService(
            config,
            session=lambda: self._sync is not None and self._sync.connected,
            links=lambda: 0 if self._link is None else self._link.greeted,
            live=lambda: self._host is not None and self._host.busy,
            uplink=lambda: self._sync,
            on_mode=self._tell_fleet,
        )

    @property
    def host(self) -> EdgeHost:
        assert self._host is not None, "enter the app first"
        return self._host

    @property
    def sync(self) -> EdgeSync | None:
        """The sync with the fleet; None before the start and where no broker is configured."""
        return self._sync

    @property
    def deployment(self) -> Deployment:
        """Where the models come from."""
        assert self._deployment is not None, "enter the app first"
        return self._deployment

    @property
    def absent(self) -> Mapping[str, str]:
        """Why each model is not served that is to be."""
        return self.deployment.absent if self._control is None else self._control.failed

    async def __aenter__(self) -> Self:
        async with self._stack:
            await self._start()
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sync is not None:
            self._sync.leave_with(await asyncio.to_thread(take_farewell, self.config.state_dir))
        await self._stack.aclose()

    async def failed(self) -> None:
        """Wait for a defect that ends the supervision of a model: raises it."""
        await self.deployment.failed()

    def ready_event(self) -> dict[str, Any]:
        """The fields of the `ready` event."""
        models = [
            {"name": offer.name, "version": offer.version, "variants": [variant.name for variant in offer.variants]}
            for offer in self.host.offers()
        ]
        return {"role": "edge", "name": self.config.name, "addresses": self.addresses, "models": models}

    async def _start(self) -> None:
        config = self.config
        _check_advertised(config)
        _check_controlled(config)
        check_sandbox(config.sandbox)
        self._devices = await devices_here(config.device, "device")
        self._tls = tls_of(config.tls, lambda: CertificateIdentity("edge", config.name))
        check_encrypted(config.mqtt, self._tls)
        self._attester = attester_of(config.attestation, self._tls, self._measure)
        models = self._deployment = self._models()
        self._sync = self._fleet_sync()
        await asyncio.to_thread(models.read)
        await self._bump_epoch()
        await asyncio.to_thread(forget_farewell, config.state_dir)
        await self._stack.enter_async_context(self._saving)
        await self._stack.enter_async_context(self.offline)
        self._queue = _queue_of(config)
        self._scheduler = await self._stack.enter_async_context(EdgeScheduler(self._queue, on_moved=self._tell_fleet))
        sensors = Sensors(config.sensors, metered=config.metered, on_change=self._tell_fleet)
        self._sensors = await self._stack.enter_async_context(sensors)
        self._host = EdgeHost(
            config.name,
            models.runners,
            self._scheduler,
            epoch=lambda: self._epoch.current,
            exhausted=lambda: self._endurance.why_not(sensors.now),
            shares=ShareWeights(config.shares),
            on_answered=self._answered,
            traces=ServedTraces(f"edge/{config.name}", random.getrandbits, await self._collector()),
            on_missed=self._loop_lag.cost.missed,
        )
        self._lines = self._help_lines()
        self._local = LocalHost(
            self._host, self.offline, on_gateway=self.offline.reach.heard, helping=self._helping_host()
        )
        self._texts = await text_models_of(self._local, models, config)
        if self._texts is not None:
            self._stack.push_async_callback(self._texts.aclose)
        await self._open_servers()
        await self._stack.enter_async_context(models)
        await models.enter(self._host)
        self._host.models.is_absent = lambda name: name in self.absent
        await models.start(self._on_progress)
        if self._boot_configuration is not None:
            self._configuration = self._configured(self._boot_configuration)
        await models.begin()
        if self._configuration is not None:
            await self._stack.enter_async_context(self._configuration)
        if self._control is not None:
            self._control.failed_before(models.absent)
            self._stack.callback(self._token.withdraw)
            publish_token(self._token, self.addresses["grpc"], config.operator_token_file)
            await self._stack.enter_async_context(self._control)
        assert self._link is not None
        await self._stack.enter_async_context(self._memory)
        # Ends after the drain: requests of gateways on streams that this device dialled are answered as well.
        dialling = gateway_dialler_of(
            config, self._link, self._gateways, tls=self._tls, draw=self._draw, dispute=self._dispute
        )
        self._dialling = await self._stack.enter_async_context(dialling)
        if self._lines is not None:
            await self._stack.enter_async_context(self._lines)
        await self._open_metrics(await self._stack.enter_async_context(CertificateWatch(self._tls)))
        await self._stack.enter_async_context(self._loop_lag)
        self._stack.push_async_callback(self._drain)
        if self._mdns is not None:  # says goodbye before the drain
            await self._stack.enter_async_context(self._mdns)
        if self._sync is not None:
            await self._stack.enter_async_context(self._sync)

    async def _open_servers(self) -> None:
        """Both open before the models are warm: a caller reads "not ready" and is not refused by the kernel."""
        config, enter = self.config, self._stack.enter_async_context
        limit = config.max_message_bytes
        ports: tuple[PortGroup, ...] = ("grpc",) if config.http_port is None else ("grpc", "http")
        shares = limits_by_port(config.limits.door, ports)
        door = await enter(
            open_grpc_server(
                self._add_services,
                config.host,
                config.grpc_port,
                max_message_bytes=limit + ROOM_BYTES,
                grace_s=CLOSE_GRACE_S,
                secured=ServerSecurity(self._tls, LOCAL, narrowed=_NARROWED) if self._tls else None,
                limits=shares["grpc"],
            )
        )
        await door.server.start()
        self.addresses["grpc"] = door.address
        if config.http_port is not None:
            oip = self._oip_routes()
            http = open_http_server(
                [
                    *device_routes(self.offline.store, self._told),
                    *oip.table(),
                    *await openai_table(self.local, self.deployment, config, self._held, self._texts, self._guard),
                ],
                config.host,
                config.http_port,
                key="http_port",
                max_body_bytes=limit,
                grace_s=CLOSE_GRACE_S,
                middlewares=[error_middleware],
                ahead=oip.ahead_of,
                secured=ServerSecurity(self._tls, LOCAL) if self._tls else None,
                limits=shares["http"],
                allowed_origins=config.allowed_origins,
            )
            self.addresses["http"] = await enter(http)

    @property
    def help(self) -> HelpLines | None:
        """The gateways and neighbours that it may ask for help; None where it asks none."""
        return self._lines

    @property
    def mdns(self) -> MdnsNeighbours | None:
        """What finds neighbours on the local network; None where it is off."""
        return self._mdns

    @property
    def local(self) -> LocalHost:
        """The models as local callers see them."""
        assert self._local is not None, "enter the app first"
        return self._local

    def _help_lines(self) -> HelpLines | None:
        """The gateways and neighbours that this device may ask for help; None where it asks none."""
        if self.config.help is None:
            return None
        name = self.host.server_name
        return HelpLines(
            name,
            lambda: Greeting(
                name, self._epoch.current, __version__, boot=self._boot, uptime_s=clock.now() - self._began_at
            ),
            gateways=self._gateways_that_help,
            neighbours=self._neighbours_that_help,
            dialler_of=self._dialler_of,
            key=read_key(self.config.dial_key_file),
            draw=self._draw,
            max_message_bytes=self.config.max_message_bytes,
        )

    def _gateways_that_help(self) -> Mapping[str, str]:
        if self._dialling is None or self.config.dial_out == "never":
            return {}
        return self._dialling.gateways()

    def _neighbours_that_help(self) -> Mapping[str, str]:
        """Address → "edge/NAME"."""
        section, published = self.config.help, {} if self._sync is None else self._sync.neighbours
        announced = {} if self._mdns is None else self._mdns.found
        return (
            {} if section is None else neighbour_addresses(section.neighbours, published, self.config.name, announced)
        )

    def _announcer(self) -> MdnsNeighbours | None:
        """What finds neighbours on the local network; None where it is off."""
        config, section = self.config, self.config.mdns
        if section is None:
            return None
        named = () if config.help is None else neighbours_by_mqtt(config.help.neighbours, config.name)
        return MdnsNeighbours(
            config.name,
            MdnsScope(config.fleet, section.site, section.interfaces, section.ttl_s),
            address=None if config.answer_neighbours is None else lambda: self.addresses["grpc"],
            looks_for=None if config.help is None else lambda name: name in named or section.may_ask(name),
            named=named,
        )

    def _dialler_of(self, address: str, named: str) -> Dialler | None:
        return None if self._dialling is None else self._dialling.dialler(address, named)

    def _helping_host(self) -> HelpingHost | None:
        section = self.config.help
        if section is None or self._lines is None:
            return None
        limits = HelpLimits(section.max_in_flight, section.max_request_bytes)
        return HelpingHost(self.host, self._lines, limits, may_use=section.may_use, unsure=section.unsure)

    @property
    def _guard(self) -> CallersGuard | None:
        """Notes callers' credentials where a gateway may need them."""
        return None if self._lines is None else CallersGuard(self.local, self.local.infer)

    def _oip_routes(self) -> OipRoutes:
        limits = self.config.limits
        return OipRoutes(
            self.local,
            guard=self._guard,
            max_body_bytes=self.config.max_message_bytes,
            control=self._access,
            limits=limits.content,
            body_limits=limits.body,
            held=self._held,
            texts=self._texts,
        )

    async def _told(self) -> dict[str, Any]:
        """The answer to `GET /v1/state`."""
        links = self._link.paths if self._link else {}
        now = clock.now()
        workers = [runner.told(now) for runner in self.deployment.serving.runners]
        return {
            **self.ready_event(),
            "ready": self.host.ready(),
            "links": links,
            "workers": workers,
            "disk": self._disk_trouble(),
            "absent": dict(self.absent),
            "name_taken": self._dispute.told(now),
            "loop_stalled": self._loop_lag.cost.evidence,
            "configuration": None if self._configuration is None else to_builtins(self._configuration.report),
            **({} if self._lines is None else {"help": self._lines.told(now)}),
            **({} if self._mdns is None else {"mdns": self._mdns.told()}),
            **({} if self._neighbours is None else {"answers_neighbours": self._neighbours.askers}),
            **await self.offline.state(),
        }

    async def _collector(self) -> Collector | None:
        collector = collector_of(self.config.tracing, "edge", self.config.name)
        return None if collector is None else await self._stack.enter_async_context(collector)

    async def _open_metrics(self, certificate: CertificateWatch) -> None:
        config = self.config
        if config.metrics_port is not None:
            assert self._scheduler is not None and self._sensors is not None
            self.addresses["metrics"] = await open_metrics(
                self._stack,
                (config.host, config.metrics_port),
                self.host,
                lambda: self.deployment.serving.runners,
                self._scheduler,
                self._sensors,
                self._sync,
                sandbox_parts(config.sandbox),
                self._generated,
                self._loop_lag,
                certificate,
                self._configuration_families,
                None if self._lines is None else self._lines.counts,
                None if self._neighbours is None else self._neighbours.answers.counts,
            )

    def _configuration_families(self) -> Iterable[Any]:
        # With prometheus-client, which is needed only where a port is configured.
        from edge_agent.configuration.families import configuration_families

        return configuration_families(self._configuration)

    def _add_services(self, server: grpc.aio.Server) -> None:
        host, limit = self.host, self.config.max_message_bytes + ROOM_BYTES
        content = self.config.limits.content
        OipService(
            self.local,
            guard=self._guard,
            max_message_bytes=limit,
            limits=content,
            held=self._held,
            texts=self._texts,
            control=self._access,
        ).add_to(server)
        self._link = LinkService(
            host,
            name=host.server_name,
            epoch=lambda: self._epoch.current,
            offers=host.offers,
            load=host.load_report,
            max_message_bytes=limit,
            attest=self._attester.answer if self._attester else no_evidence,
            limits=content,
            boot=self._boot,
            uptime_s=lambda: clock.now() - self._began_at,
        ).add_to(server)
        if (section := self.config.answer_neighbours) is not None:
            self._neighbours = NeighbourService(
                host,
                NeighbourAnswers(
                    section.may_use,
                    max_in_flight=section.max_in_flight,
                    most_queued=lambda: self.config.max_queue_size,
                ),
                may_ask=section.may_ask,
                encrypted=self._tls is not None,
                epoch=lambda: self._epoch.current,
                max_message_bytes=limit,
                limits=content,
            )
            self._neighbours.add_to(server)

    def _fleet_sync(self) -> EdgeSync | None:
        config = self.config
        if config.mqtt is None:
            return None
        try:
            return EdgeSync(
                config.mqtt,
                fleet=config.fleet,
                device=config.name,
                state=self.state,
                epochs=self._epoch,
                draw=self._draw,
                agent_version=__version__,
                tls=self._tls.client_context if self._tls else None,
                ear=self.offline,
                groups=config.rollout.groups if config.rollout else (),
                on_desired=self.deployment.take if config.rollout else None,
                boot=self._boot,
                started_at=self._began_at,
                dispute=self._dispute,
                neighbours=() if config.help is None else neighbours_by_mqtt(config.help.neighbours, config.name),
            )
        except ValueError as error:
            raise StartError(f"key 'mqtt': {error}") from error

    def _gateways(self) -> Mapping[str, GatewayState]:
        """The gateways that the sync has heard of."""
        return self._sync.gateways if self._sync else {}

    def state(self) -> AgentState:
        """What the fleet hears of this device."""
        host, seen = self.host, self._sensors.now if self._sensors else UNTOLD
        admission: Admission = "open"
        if host.draining:
            admission = "draining"
        elif self._endurance.why_not(seen):
            admission = "closed"
        own = replace(
            seen,
            mode=self.offline.mode,
            kept=self.offline.backlog,
            unwritable=bool(self._disk_trouble()),
            held_up_s=round(self._loop_lag.cost.held_up_s, 1),
            absent=absent_in_words(self.absent),
        )
        conditions = self._memory.told(own)
        return AgentState(
            host.offers(),
            self._urls(),
            host.load_report(),
            admission,
            conditions,
            rollouts=self.deployment.rollouts,
            configuration=None if self._configuration is None else self._configuration.report,
        )

    def _urls(self) -> tuple[str, ...]:
        """Where this device is reached: nowhere if it listens on every address, advertises none, and dials."""
        config = self.config
        if config.advertise is None and config.host in WILDCARDS:
            return ()
        return (config.advertise or self.addresses["grpc"],)

    async def _bump_epoch(self) -> None:
        """Load reports of this process must order after those of the one before, MQTT or not."""
        try:
            await asyncio.to_thread(self._epoch.bump, clock.utc_s())
        except OSError as error:
            raise StartError(f"cannot write {self._epoch.path} (key 'state_dir'): {error.strerror}") from error

    async def _save_epoch(self) -> None:
        """A disk that was full at a start may have room later, and no new session need begin for that."""
        while True:
            await clock.sleep(SAVE_AGAIN_S)
            try:
                saved = bool(self._epoch.unsaved) and await asyncio.to_thread(self._epoch.save)
                if saved:
                    self._tell_fleet()
            except OSError as error:
                log.warning("the session's number cannot be written", reason=str(error))

    def _disk_trouble(self) -> str:
        """Why the disk takes nothing, as far as this agent tried; "" while it does."""
        return self._epoch.unsaved or (self._deployment.disk_trouble if self._deployment is not None else "")

    def _model_control(self) -> RepositoryControl | None:
        config = self.config
        if config.model_control == "none":
            return None
        loader = EdgeModelLoader(
            config.model_repository,
            config.allowed_engines,
            serving=lambda: self.deployment.serving,
            served=lambda: {one.name: one for one in self.host.manifests()},
        )
        return RepositoryControl(
            f"edge/{config.name}",
            config.model_repository,
            loader,
            mode=config.model_control,
            wanted=lambda name: config.model_control == "explicit" or config.models is None or name in config.models,
            poll_s=config.repository_poll_s,
        )

    @property
    def _access(self) -> TokenAccess | None:
        return None if self._control is None else TokenAccess(self._control, self._token)

    def _models(self) -> Deployment:
        return Deployment(
            self.config,
            self._runner,
            conditions=lambda: self._sensors.now if self._sensors else UNTOLD,
            gateways=self._gateways,
            linked=lambda: (self._sync is not None and self._sync.connected) or bool(self._link and self._link.greeted),
            draw=self._draw,
            tls=self._tls.client_context if self._tls else None,
            on_routed=self._announce,
            on_change=self._tell_fleet,
            documents=self if self._boot_configuration is not None else None,
        )

    def heard(self, documents: TrustedDocuments) -> None:
        if self._configuration is not None:
            self._configuration.desire(documents.configuration())

    def why_not(self, configuration: DesiredConfiguration) -> str:
        return "" if self._configuration is None else self._configuration.why_not(configuration.settings)

    def _configured(self, boot: BootConfiguration) -> ConfigurationService:
        assert self._queue is not None and self._sensors is not None
        parts = RunningParts(
            queue=self._queue,
            endurance=self._endurance,
            sensors=self._sensors,
            held=self._held,
            offline=self.offline,
            deployment=self.deployment,
            host=self.host,
            counts=self._counts,
        )

        async def apply(config: EdgeConfig) -> None:
            await parts.renewed(self.config, config, self._make_runners_by)
            parts.bound(config)
            self._announce()

        return ConfigurationService(
            boot,
            apply=apply,
            standing=parts.standing,
            actual=changed_by_others,
            busy=lambda: self.deployment.busy,
            on_change=self._tell_fleet,
        )

    def _make_runners_by(self, config: EdgeConfig) -> None:
        self.config, self._costs = config, _costs_of(config)

    def _answered(self, runner: Runner, compute_s: float | None) -> None:
        self._counts.record(compute_s)
        self.deployment.answered(runner, compute_s)

    def _runner(self, entry: CatalogueEntry, generation: int) -> Runner:
        config = self.config
        config.steps.check(entry.manifest)
        start_worker = worker_starter(nice=config.nice, cgroup=config.cgroup, sandbox=config.sandbox)
        return Runner(
            entry.manifest,
            entry.loadables,
            start_worker=start_worker,
            sandbox=sandbox_gaps(config.sandbox),
            measure=self._costs.measuring(config.warmup_budget_s / len(entry.loadables)),
            warm=warm,
            backoff=Backoff(self._draw, base_s=0.5, cap_s=30.0),
            on_change=self._changed,
            threads=config.threads,
            paced_slow=config.paced_slow,
            hang_timeout_s=config.hang_timeout_s,
            generation=generation,
            sequences=EdgeSequences(self._generated, config.max_queue_size, config.generation_cache_bytes),
            step_limits=config.steps.limits,
            trials=DeviceTrials(self._devices, start_worker) if self._devices else None,
        )

    def _changed(self, runner: Runner) -> None:
        """A model came or went: every gateway hears it now, by link stream and by MQTT."""
        self.host.refresh(runner)
        self._announce()

    def _announce(self) -> None:
        if self._link is not None:
            self._link.announce()
        self._tell_fleet()

    def _tell_fleet(self) -> None:
        if self._sync is not None:
            self._sync.notify()

    async def _drain(self) -> None:
        assert self._link is not None
        self.host.drain()
        try:
            async with asyncio.timeout(self.config.drain_s):
                near = () if self._neighbours is None else (self._neighbours.links.drain("shutdown"),)
                await asyncio.gather(self._link.drain("shutdown"), *near, self.host.drained())
        except TimeoutError:
            log.warning("requests were still under way at shutdown", queued=self.host.load_report().queued)

    def _measure(self) -> Measurement:
        return measure_process(__version__, self.host.offers(), self.host.manifest)

    def __repr__(self) -> str:
        return f"<EdgeApp {self.config.name} {self.addresses} {self._host!r}>"


def _costs_of(config: EdgeConfig) -> MeasuredCosts:
    # What a model costs depends on the device that its trial chooses, which is no part of the key.
    path = config.state_dir / "costs.json" if config.remember_costs and config.device == "cpu" else None
    return MeasuredCosts(path, settings=f"threads={config.threads} nice={config.nice} paced_slow={config.paced_slow:g}")


def _check_controlled(config: EdgeConfig) -> None:
    if config.model_control == "none":
        return
    if config.rollout is not None:
        raise StartError(
            f"key 'model_control': {config.model_control} does not go with 'rollout', whose documents say what a "
            "device serves; leave one of them out"
        )
    if named := [name for name in config.models or () if ":" in name]:
        raise StartError(f"key 'models': {named[0]!r} names a version; model_control serves the highest of a name")


def _queue_of(config: EdgeConfig) -> EdgeQueue:
    shares = FairShare(config.shares) if config.shares else None
    return EdgeQueue(max_size=config.max_queue_size, slots=config.slots, shares=shares, ahead_s=HAND_OVER_AHEAD_S)


def _check_advertised(config: EdgeConfig) -> None:
    if config.mqtt is None or config.advertise is not None or config.dial_out == "always":
        return
    if config.host in WILDCARDS:
        raise StartError(
            f"key 'advertise' is needed: 'host' is {config.host!r}, which tells no gateway where this device is "
            "(a device that cannot be reached says 'dial_out: always')"
        )

"""The pool app puts a pool together: what is started in which order, and how it ends.

    repository → port taken → workers load and warm → server starts → ready

The port is taken first, so that a taken one is known before minutes of warm-up; connections wait in its backlog until
the server starts, when everything is warm.

The end runs backwards and within `drain_s` plus a moment: new requests are refused, each link stream hears a goodbye,
what is under way is answered; then server, workers and futures end.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
import structlog
from numpy.typing import NDArray

from cloud_pool.absent_models import AbsentPoolModels
from cloud_pool.banner import serving_banner
from cloud_pool.config import PoolConfig
from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.core.health.adaptive_control import AdaptiveControl
from cloud_pool.core.health.standby import Standby
from cloud_pool.core.sharing.worker_layout import WorkerPlace, worker_places
from cloud_pool.model_control import PoolModelControl
from cloud_pool.resident_maker import ResidentMaker
from cloud_pool.scheduling.device_arbiter import DeviceArbiter
from cloud_pool.scheduling.job import Batch, PoolRequest
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.serving.host import PoolHost
from cloud_pool.workers.catalogue import check_memory, read_catalogue, weights_bytes, what_fits
from cloud_pool.workers.device_worker import DeviceWorker, PoolLoadable
from cloud_pool.workers.generating_recycling import GeneratingRecycling
from cloud_pool.workers.generating_start import GeneratingStarts
from cloud_pool.workers.generating_workers import GeneratingWorkers
from cloud_pool.workers.health_controller import HealthController, cost_ratio
from cloud_pool.workers.joined_workers import JoinedGenerationWorkers, JoinedModelWorkers
from cloud_pool.workers.load_priority import LoadPriority
from cloud_pool.workers.memory_limit import MemoryLimit, computes_on_cpu, memory_bytes
from cloud_pool.workers.model_workers import GenerationWorkers, ModelWorkers
from cloud_pool.workers.onnx_placement import placed
from cloud_pool.workers.residents import Residents
from cloud_pool.workers.steps_worker import StepsWorker
from cloud_pool.workers.supervisor import PeakObserver, PoolSupervisor, measure_anew
from tidegate import __version__, clock
from tidegate.estimate.cost_table import CostTable
from tidegate.link.attestation_challenge import no_evidence
from tidegate.link.client import ROOM_BYTES
from tidegate.link.service import LinkService
from tidegate.metrics.generated import GeneratedCounts
from tidegate.metrics.loop_lag import LoopLag
from tidegate.metrics.scrape_port import ScrapeServer
from tidegate.models.fair_share import FairShare
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import Repository
from tidegate.models.work import Work
from tidegate.mqtt.broker_url import BrokerUrl
from tidegate.oip.body_budget import BodyMemory
from tidegate.oip.grpc.health import HEALTH_SERVICE
from tidegate.oip.grpc.server import OipService
from tidegate.oip.guard import OpenGuard
from tidegate.oip.repository.model_control import FixedModels, ModelControl
from tidegate.outcome import ModelNotFound, NotSupported
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import first_to_end
from tidegate.runtime.process import StartError
from tidegate.security.attestation.attester import Attester, attester_of
from tidegate.security.attestation.measurement import Measurement, measure_process
from tidegate.security.certificate_identity import CertificateIdentity, Role
from tidegate.security.certificate_watch import CertificateWatch
from tidegate.security.tls import Tls, check_encrypted, tls_of
from tidegate.servers.grpc_server import BoundGrpcServer, open_grpc_server
from tidegate.servers.role_guard import ServerSecurity
from tidegate.trace_context import Trace
from tidegate.tracing.collector import Collector, collector_of
from tidegate.tracing.served import ServedTraces
from tidegate.tracing.span import Value
from tidegate.workers.process import WorkerProcess
from tidegate.workers.recycling import Recycling
from tidegate.workers.sandbox_check import check_sandbox, sandbox_gaps, sandbox_parts
from tidegate.workers.warming.device_trial import DeviceTrials
from tidegate.workers.warming.measured_costs import MeasuredCosts
from tidegate.workers.warming.onnx_devices import devices_here
from tidegate.workers.warmup import CostPoints, warm

if TYPE_CHECKING:
    from cloud_pool.announcer import PoolAnnouncer

WILDCARDS: Final = ("", "0.0.0.0", "::")
GATEWAYS: Final[frozenset[Role]] = frozenset({"gateway"})
# `tidegate health` shows the pool's own certificate, and learns with it whether the pool is ready, and no more.
ASKS_HEALTH: Final[frozenset[Role]] = GATEWAYS | {"pool"}
_MEASURE_S: Final = 60.0  # for one answer of a model whose steps are measured
CLOSE_GRACE_S = 0.1  # what calls that are left get when the server closes, after the drain
log = structlog.get_logger(__name__)


class PoolApp:
    """A whole pool, serving inside `async with`.

    Args:
        draw: chance, uniform in [0, 1).
        on_progress: called with words for what a long start is at.
        sharing: servers that divide the machine's memory, this one included (`cloud_pool/servers.py`).
    """

    def __init__(
        self,
        config: PoolConfig,
        *,
        draw: Callable[[], float] = random.random,
        on_progress: Callable[[str], None] = lambda _: None,
        sharing: int = 1,
    ) -> None:
        self.config = config
        self._sharing = sharing
        self.address = ""
        self.metrics_address = ""
        self.steward: HealthController | None = None
        self._draw = draw
        self._on_progress = on_progress
        self._stack = AsyncExitStack()
        self._host: PoolHost | None = None
        self._scheduler: PoolScheduler | None = None
        self._load_priority = LoadPriority()
        self._supervisor: ModelWorkers | None = None
        self._fixed: PoolSupervisor | None = None  # those of them that fixed models share
        self._generating: GenerationWorkers | None = None
        self._steps: dict[tuple[str, str], StepsWorker] = {}
        self._control: PoolModelControl | None = None
        self._maker: ResidentMaker | None = None  # of fixed models that come later
        self._link: LinkService | None = None
        self._attester: Attester | None = None
        self._absent = AbsentPoolModels(config.model_repository)  # of fixed models
        self._loop_lag = LoopLag()
        self._costs = MeasuredCosts(
            None if config.state_dir is None else config.state_dir / "costs.json",
            settings=f"device={config.device} {' '.join(config.devices)} workers={config.workers} "
            f"threads={config.threads} paced_slow={config.paced_slow:g}",
        )

    @property
    def generating(self) -> GenerationWorkers:
        assert self._generating is not None, "enter the app first"
        return self._generating

    @property
    def control(self) -> ModelControl:
        """What loads and unloads models, for one that embeds the pool. Raises NotSupported where they are fixed."""
        if self._control is None:
            raise NotSupported("the models are fixed: key 'model_control' is none")
        return self._control.control

    @property
    def linked(self) -> bool:
        """Whether a gateway has a link to here."""
        return self._link is not None and bool(self._link.greeted)

    @property
    def host(self) -> PoolHost:
        assert self._host is not None, "enter the app first"
        return self._host

    async def __aenter__(self) -> Self:
        async with self._stack:
            await self._start()
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def failed(self) -> None:
        """Wait for a defect that ends the supervision of a worker: raises it."""
        assert self._supervisor is not None and self._generating is not None, "enter the app first"
        defects = [
            self._supervisor.failed(),
            self._generating.failed(),
            *(one.failed() for one in self._steps.values()),
        ]
        await first_to_end(*defects, name="a supervision has a defect")

    def ready_event(self) -> dict[str, Any]:
        """The fields of the `ready` event."""
        models = [
            {"name": offer.name, "version": offer.version, "variants": [variant.name for variant in offer.variants]}
            for offer in self.host.offers()
        ]
        addresses = {"grpc": self.address, **({"metrics": self.metrics_address} if self.metrics_address else {})}
        return {"role": "pool", "name": self.config.name, "addresses": addresses, "models": models}

    def words(self) -> list[str]:
        """What a person who started it by hand wants to know."""
        host, config = self.host, self.config
        models = [(host.manifest(offer.name), offer) for offer in host.offers()]
        return serving_banner(config.name, self.address, config.device, models)

    async def _start(self) -> None:
        config = self.config
        check_sandbox(config.sandbox)
        tls = tls_of(config.tls, lambda: CertificateIdentity("pool", config.name))
        _check_announced(config, tls)
        self._attester = attester_of(config.attestation, tls, self._measure)
        memory_limit = MemoryLimit(config.memory_limit_bytes, memory_bytes(), self._sharing)
        loadables = await self._on_onnx_devices(self._what_fits(await self._catalogue(), memory_limit.of(None)))
        plain, generating = _by_kind(loadables)
        traces = ServedTraces(f"pool/{config.name}", random.getrandbits, await self._collector())
        scheduler = self._scheduler = await self._start_scheduler(traces)
        workers = self._make_workers(plain, generating, scheduler, memory_limit)
        control = AdaptiveControl(config.control.limits)
        self._host = self._new_host(loadables, traces, control)
        self._host.models.is_absent = self._is_absent
        if self._control is not None:
            self._control.serve(self._host, self._announce)
        elif self._maker is not None:
            self._absent.serve(self._host, self._maker, self._announce)
        door = await self._stack.enter_async_context(self._grpc_server(tls))
        self.address = door.address
        if self._control is not None:
            self._control.publish(door.address)
        for one in workers:
            await self._stack.enter_async_context(one)
        for steps in list(self._steps.values()):  # they are measured around the model's answers
            await self._start_steps(steps)
        self._check_some()
        self.steward = await self._stack.enter_async_context(self._new_steward(control))
        await self._stack.enter_async_context(self._generating_recycling(self.generating, self.steward.recycles))
        await self._open_metrics(await self._stack.enter_async_context(CertificateWatch(tls)))
        await self._stack.enter_async_context(self._loop_lag)
        await door.server.start()
        await self._stack.enter_async_context(self._absent)
        announcer = await self._announced(tls)  # it says goodbye after the drain, and that it drains before
        self._stack.push_async_callback(self._drain, door.server, announcer)

    async def _start_scheduler(self, traces: ServedTraces) -> PoolScheduler:
        standby = Standby(self.config.standby_wait_s) if self.config.standby_workers else None
        arbiter = DeviceArbiter(FairShare(self.config.shares))
        return await self._stack.enter_async_context(
            PoolScheduler(standby, arbiter, on_traced=partial(_trace_batch, traces))
        )

    def _make_workers(
        self,
        plain: list[PoolLoadable],
        generating: list[PoolLoadable],
        scheduler: PoolScheduler,
        memory_limit: MemoryLimit,
    ) -> list[AbstractAsyncContextManager[object]]:
        """Make what computes. Returns what is to be started, in this order and before the workers of steps, once the
        pool's address is known."""
        places = self._places()
        if self.config.model_control != "none":
            maker = self._new_maker(scheduler, places, memory_limit)
            self._control = PoolModelControl(self.config, maker, places=len(places))
            self._supervisor = self._generating = self._control.residents
            return [self._control]
        leave_out = self._left_out if self._may_leave_out else None
        fixed = self._new_supervisor(plain, scheduler, places if plain else [], memory_limit, leave_out=leave_out)
        talking = self._new_generating(generating, scheduler, memory_limit, leave_out=leave_out)
        self._supervisor, self._fixed, self._generating = fixed, fixed, talking
        self._steps = {
            (one.manifest.name, one.manifest.version): self._new_steps(one, scheduler)
            for one in reversed(plain)  # the first variant of each is the one that is asked for no other
            if one.public is not None
        }
        if not self._may_leave_out:
            return [fixed, talking]
        in_use = places[: len(places) - self.config.standby_workers]  # what comes later has no reserve
        self._maker = self._new_maker(scheduler, in_use, memory_limit, talking.counts)
        residents = self._maker.residents
        self._supervisor = JoinedModelWorkers(fixed, residents)
        self._generating = JoinedGenerationWorkers(talking, residents)
        return [fixed, talking, residents]

    def _new_host(self, loadables: list[PoolLoadable], traces: ServedTraces, control: AdaptiveControl) -> PoolHost:
        assert self._scheduler is not None and self._supervisor is not None
        config = self.config
        return PoolHost(
            config.name,
            loadables,
            self._scheduler,
            self._fixed or self._supervisor,
            epoch=int(clock.utc_s() * 1e6),
            generating=self._generating,
            steps=self._steps,
            lesser=config.control.degrade_to or "",
            spare=config.control.degrade_to not in config.also_precisions,
            degraded=lambda: control.degraded,
            traces=traces,
            on_missed=self._loop_lag.cost.missed,
        )

    def _grpc_server(self, tls: Tls | None) -> AbstractAsyncContextManager[BoundGrpcServer]:
        """The server for gateways, bound and not started."""
        config = self.config
        return open_grpc_server(
            self._add_services,
            config.host,
            config.grpc_port,
            max_message_bytes=config.max_message_bytes + ROOM_BYTES,
            grace_s=CLOSE_GRACE_S,
            secured=ServerSecurity(tls, GATEWAYS, narrowed={HEALTH_SERVICE: ASKS_HEALTH}) if tls else None,
            limits=config.limits.door,
        )

    async def _catalogue(self) -> list[PoolLoadable]:
        """What is served for good; none where models come and go."""
        config = self.config
        if config.model_control != "none":
            return []
        found = await asyncio.to_thread(
            read_catalogue,
            Repository(config.model_repository),
            config.models,
            *self._precisions,
            config.allowed_engines,
            check=config.steps.check,
        )
        served = {one.manifest.name for one in found.loadables}
        for (name, version), why in sorted(found.problems.items()):
            if name in served:
                log.error("a version cannot be read, and others stand in", model=name, version=version, reason=why)
        for (name, version), why in sorted(found.unfit.items()):
            log.warning("a version is passed over, and a lower one serves", model=name, version=version, reason=why)
        self._absent.found(found)
        return list(found.loadables)

    async def _on_onnx_devices(self, loadables: list[PoolLoadable]) -> list[PoolLoadable]:
        config = self.config
        devices = await devices_here(config.onnx_device, "onnx_device")
        if devices and config.model_control != "none":
            raise StartError(
                f"key 'onnx_device': {config.onnx_device} is tried when the pool starts, and with model_control: "
                f"{config.model_control} models come later; leave one of them out"
            )
        if not devices:
            return loadables
        trials = DeviceTrials(devices, lambda name: WorkerProcess(f"{config.name}/{name}", sandbox=config.sandbox))
        return await placed(loadables, trials, config.threads)

    async def _start_steps(self, steps: StepsWorker) -> None:
        """Start the worker of the steps around a model, or leave that model out. Raises StartError."""
        try:
            await self._stack.enter_async_context(steps)
        except StartError as error:
            if not self._may_leave_out or self._fixed is None:
                raise
            self._fixed.discard(steps.manifest.of_model, ModelNotFound(str(error)))
            self._left_out(steps.manifest, str(error))

    def _new_steps(self, loadable: PoolLoadable, scheduler: PoolScheduler) -> StepsWorker:
        """The worker of the steps around a model."""
        config, manifest = self.config, loadable.public
        assert manifest is not None  # its caller has looked

        async def compute(inputs: dict[str, NDArray[Any]], work: Work) -> Mapping[str, NDArray[Any]]:
            now = clock.now()
            done = await scheduler.submit(loadable.key, PoolRequest(inputs, work.units, now, now + _MEASURE_S))
            return done.outputs

        return StepsWorker(
            manifest,
            loadable.variant,
            loadable.artefact.parent,
            limits=config.steps.limits,
            compute=compute,
            start_process=lambda name: WorkerProcess(f"{config.name}/{name}", sandbox=config.sandbox),
            backoff=Backoff(self._draw, base_s=0.5, cap_s=30.0),
            hang_timeout_s=config.hang_timeout_s,
            on_change=self._announce,
        )

    @property
    def _precisions(self) -> tuple[str, tuple[str, ...]]:
        """The one that is served, and those behind it."""
        return self.config.precision, (*self.config.also_precisions, *self._lesser)

    @property
    def _lesser(self) -> tuple[str, ...]:
        """What the control may switch to."""
        return (self.config.control.degrade_to,) if self.config.control.degrade_to else ()

    def _new_steward(self, control: AdaptiveControl) -> HealthController:
        assert self._scheduler is not None and self._supervisor is not None
        recycling, supervisor = self.config.recycling, self._supervisor
        wanted = Recycling(self._draw, gap_s=recycling.min_gap_s, after_requests=recycling.after_requests)
        return HealthController(
            self._supervisor,
            self._scheduler,
            limits=recycling.limits,
            recycling=wanted if recycling.enabled else None,
            control=control,
            latency_target_s=self.config.control.target_s,
            full_cost_ratio=lambda: cost_ratio(supervisor.lanes.values(), self.config.control.degrade_to),
            every_s=recycling.check_s,
            on_turn=self._announce,
        )

    def _generating_recycling(self, workers: GenerationWorkers, recycles: Counter[str]) -> GeneratingRecycling:
        keys = self.config.recycling
        wanted = Recycling(self._draw, gap_s=keys.min_gap_s, after_requests=keys.after_requests)
        return GeneratingRecycling(
            (lambda: workers.replicas) if keys.enabled else (),
            wanted,
            recycles,
            waiting=lambda: any(one.queued for one in workers.schedulers()),
            horizon_s=keys.memory_horizon_s,
            every_s=keys.check_s,
        )

    async def _collector(self) -> Collector | None:
        collector = collector_of(self.config.tracing, "pool", self.config.name)
        return None if collector is None else await self._stack.enter_async_context(collector)

    async def _open_metrics(self, certificate: CertificateWatch) -> None:
        if self.config.metrics_port is None:
            return
        assert self._scheduler is not None and self._supervisor is not None and self.steward is not None
        try:
            # Needed only by those who set the port.
            from cloud_pool.metrics import PoolMetrics
            from tidegate.metrics.certificate_families import certificate_families
            from tidegate.metrics.exposition import Exposition
            from tidegate.metrics.loop_families import loop_families
        except ModuleNotFoundError as error:
            raise StartError("key 'metrics_port' needs prometheus-client: pip install 'tidegate[metrics]'") from error
        metrics = PoolMetrics(
            scheduler=self._scheduler,
            supervisor=self._supervisor,
            steward=self.steward,
            statistics=self.host.statistics,
            live_sequences=self.host.sequences.live,
            coalesced=lambda: self.host.coalesced,
            served=self.host.served,
            sandbox=sandbox_parts(self.config.sandbox),
            generating=self._generating,
        )
        exposition = Exposition(metrics.collect)
        exposition.add(lambda: loop_families(self._loop_lag))
        exposition.add(lambda: certificate_families(certificate.validity_utc_s()))
        try:
            door = await self._stack.enter_async_context(
                ScrapeServer(exposition.render, self.config.host, self.config.metrics_port)
            )
        except OSError as error:
            raise StartError(
                f"key 'metrics_port': {self.config.metrics_port} cannot be listened on: {error}"
            ) from error
        self.metrics_address = door.address

    def _places(self) -> list[WorkerPlace]:
        config = self.config
        return worker_places(
            config.devices or (config.device,),
            workers=config.workers,
            standby=config.standby_workers,
            threads=config.threads,
            cores=sorted(os.sched_getaffinity(0)),
            pinned=config.cpu_affinity,
        )

    @property
    def _may_leave_out(self) -> bool:
        """Whether a model of the fixed ones that cannot be served keeps no other away: none is named."""
        return self.config.models is None

    def _what_fits(self, loadables: list[PoolLoadable], limit_bytes: float) -> list[PoolLoadable]:
        """What fits into the machine's memory; the other models are problems. Raises StartError."""
        places = self._places()

        def check(ones: Sequence[PoolLoadable]) -> None:
            self._check_memory(ones, places, limit_bytes)

        if not self._may_leave_out:
            check(loadables)
            return loadables
        fitting, others = what_fits(loadables, check)
        for manifest, why in others:
            self._absent.note(manifest, why)
        if not fitting and others:
            raise self._absent.none_is_served()
        return fitting

    def _check_memory(self, loadables: Sequence[PoolLoadable], places: list[WorkerPlace], limit_bytes: float) -> None:
        """Refuse what cannot fit into the machine's memory: what generates is there once for each device."""
        plain, generating = _by_kind(loadables)
        once = sum(computes_on_cpu(device) for device in self.config.devices or (self.config.device,))
        check_memory(generating, workers=once, limit_bytes=limit_bytes, device="cpu")
        left_bytes = limit_bytes - once * sum(weights_bytes(one.variant) for one in generating)
        on_cpu = sum(computes_on_cpu(place.device) for place in places)
        check_memory(plain, workers=on_cpu, limit_bytes=left_bytes, device="cpu")

    def _new_supervisor(
        self,
        loadables: list[PoolLoadable],
        scheduler: PoolScheduler,
        places: list[WorkerPlace],
        memory_limit: MemoryLimit,
        *,
        model: str = "",
        known: Mapping[str, ModelInstance] | None = None,
        leave_out: Callable[[Manifest, str], None] | None = None,
    ) -> PoolSupervisor:
        config = self.config
        return PoolSupervisor(
            loadables,
            scheduler,
            start_process=lambda life, cores: WorkerProcess(
                f"{config.name}/{life}",
                cores=cores,
                sandbox=config.sandbox,
                on_spawn=self._load_priority.lower if model else lambda _pid: None,
            ),
            new_backoff=lambda: Backoff(self._draw, base_s=0.5, cap_s=30.0),
            places=places,
            standby=0 if model else config.standby_workers,
            memory_limit=memory_limit,
            paced_slow=config.paced_slow,
            hang_timeout_s=config.hang_timeout_s,
            warmup_budget_s=config.warmup_budget_s,
            model=model,
            load_priority=self._load_priority if model else None,
            known=known,
            measuring=self._measured,
            leave_out=leave_out,
            sandbox=sandbox_gaps(config.sandbox),
            on_change=self._announce,
            on_lost=self._announce,
            on_progress=self._on_progress,
        )

    async def _measured(
        self, worker: DeviceWorker, loadable: PoolLoadable, budget_s: float, on_peak: PeakObserver
    ) -> CostPoints:
        """What a variant costs here, as it was measured now or in an earlier run."""

        async def anew(worker: DeviceWorker, key: str, manifest: Manifest, variant: Variant) -> CostPoints:
            return await measure_anew(worker, loadable, budget_s, on_peak)

        async def known(worker: DeviceWorker, key: str, manifest: Manifest, variant: Variant, table: CostTable) -> None:
            await warm(worker, key, manifest, variant, table, starved_s=lambda: worker.starved_s)

        measured = self._costs.remembered(anew, known)
        return await measured(worker, loadable.key, loadable.manifest, loadable.variant)

    def _new_maker(
        self,
        scheduler: PoolScheduler,
        places: list[WorkerPlace],
        memory_limit: MemoryLimit,
        counts: GeneratedCounts | None = None,
    ) -> ResidentMaker:
        residents = Residents(sandbox_gaps(self.config.sandbox))
        first, others = self._precisions
        return ResidentMaker(
            self.config,
            scheduler,
            residents=residents,
            precisions=(first, *others),
            costs=self._costs,
            workers_on_cpu=sum(computes_on_cpu(place.device) for place in places),
            memory_limit=memory_limit,
            supervising=lambda loadables, model, known: self._new_supervisor(
                list(loadables), scheduler, places, memory_limit, model=model, known=known
            ),
            generating=lambda loadables: self._new_generating(
                list(loadables), scheduler, memory_limit, counts or residents.counts
            ),
            steps=lambda loadable: self._new_steps(loadable, scheduler),
        )

    def _new_generating(
        self,
        loadables: list[PoolLoadable],
        scheduler: PoolScheduler,
        memory_limit: MemoryLimit,
        counts: GeneratedCounts | None = None,
        leave_out: Callable[[Manifest, str], None] | None = None,
    ) -> GeneratingWorkers:
        config = self.config
        return GeneratingWorkers(
            loadables,
            scheduler.allotment,
            start_of=GeneratingStarts(
                config.vllm, pool=config.name, sandbox=config.sandbox, cache_bytes=config.generation_cache_bytes
            ).of,
            new_backoff=lambda: Backoff(self._draw, base_s=0.5, cap_s=30.0),
            places=worker_places(
                config.devices or (config.device,),
                workers=1,
                threads=config.threads,
                cores=sorted(os.sched_getaffinity(0)),
            ),
            cache_bytes=config.generation_cache_bytes,
            memory_limit=memory_limit,
            paced_slow=config.paced_slow,
            hang_timeout_s=config.hang_timeout_s,
            warmup_budget_s=config.warmup_budget_s,
            counts=counts,
            leave_out=leave_out,
            on_change=self._announce,
            on_lost=self._announce,
            on_progress=self._on_progress,
        )

    def _add_services(self, server: grpc.aio.Server) -> None:
        host, limit = self.host, self.config.max_message_bytes + ROOM_BYTES
        content = self.config.limits.content
        held = BodyMemory(self.config.limits.max_held_bytes)
        control = self._fixed_models() if self._control is None else self._control.access
        OipService(host, max_message_bytes=limit, limits=content, held=held, control=control).add_to(server)
        self._link = LinkService(
            host,
            name=host.server_name,
            epoch=lambda: host.epoch,
            offers=host.offers,
            load=host.load_report,
            max_message_bytes=limit,
            attest=self._attester.answer if self._attester else no_evidence,
            limits=content,
        ).add_to(server)

    def _is_absent(self, name: str) -> bool:
        """Whether a model that is not served is there, and is wrong."""
        if self._control is not None:
            return name in self._control.control.failed
        return name in self._absent

    def _left_out(self, manifest: Manifest, why: str) -> None:
        """Serve a model no longer that no worker can compute: at the start, or when workers had to start again."""
        self.host.models.remove(manifest.name)
        self._steps.pop((manifest.name, manifest.version), None)
        self._absent.note(manifest, why)
        self._announce()

    def _check_some(self) -> None:
        """Raise StartError where every model was left out."""
        if self._control is None and not list(self.host.models):
            raise self._absent.none_is_served()

    def _fixed_models(self) -> FixedModels:
        return FixedModels(OpenGuard(self.host), self._absent.statuses)

    def _announce(self) -> None:
        """The models came or went: gateways on a link stream hear it now."""
        if self._link is not None:
            self._link.announce()

    async def _announced(self, tls: Tls | None) -> PoolAnnouncer | None:
        config = self.config
        if config.mqtt is None:
            return None
        # Needed only by those who set the key.
        from cloud_pool.announcer import PoolAnnouncer

        return await self._stack.enter_async_context(
            PoolAnnouncer(
                config.mqtt,
                fleet=config.fleet,
                pool=config.name,
                address=config.advertise or self.address,
                zone=config.zone,
                draw=self._draw,
                tls=tls.client_context if tls else None,
            )
        )

    async def _drain(self, server: grpc.aio.Server, announcer: PoolAnnouncer | None) -> None:
        assert self._scheduler is not None and self._link is not None and self._generating is not None
        if announcer is not None:
            announcer.drain()
        self.host.drain()
        try:
            async with asyncio.timeout(self.config.drain_s):
                await asyncio.gather(
                    self._link.drain("shutdown"), self._scheduler.drained(), self._generating.drained()
                )
        except TimeoutError:
            log.warning("requests were still under way at shutdown", queued=self.host.load_report().queued)
        self._scheduler.close()
        self.host.sequences.close()
        await server.stop(CLOSE_GRACE_S)

    def _measure(self) -> Measurement:
        return measure_process(__version__, self.host.offers(), self.host.manifest)

    def __repr__(self) -> str:
        return f"<PoolApp {self.config.name} {self.address} {self._host!r}>"


def _by_kind(loadables: Sequence[PoolLoadable]) -> tuple[list[PoolLoadable], list[PoolLoadable]]:
    """Those that compute batches, and those that generate."""
    generating = [one for one in loadables if one.manifest.generative is not None]
    return [one for one in loadables if one.manifest.generative is None], generating


def _check_announced(config: PoolConfig, tls: Tls | None) -> None:
    """Before minutes of warm-up. Raises StartError where the pool could not be announced."""
    if config.mqtt is None:
        return
    check_encrypted(config.mqtt, tls)
    if config.advertise is None and config.host in WILDCARDS:
        raise StartError(
            f"key 'advertise' is needed: 'host' is {config.host!r}, which tells no gateway where this pool is"
        )
    if find_spec("paho") is None:
        raise StartError("key 'mqtt' needs paho-mqtt: pip install 'tidegate[announce]'")
    try:
        BrokerUrl.parse(config.mqtt)
    except ValueError as error:
        raise StartError(f"key 'mqtt': {error}") from error


def _trace_batch(traces: ServedTraces, batch: Batch, members: list[Trace], worker: str) -> None:
    """Record a batch with sampled members as a span of its own."""
    attributes: dict[str, Value] = {
        "tidegate.lane": batch.lane.key,
        "tidegate.worker": worker,
        "tidegate.rows": batch.rows,
        "tidegate.requests": len(batch.parts),
        "tidegate.closed_by": batch.closed_by,
        "tidegate.work_units": batch.units,
        "tidegate.padded_units": max(0.0, batch.units - batch.own_units),
    }
    traces.computed(members, batch.began_at, clock.now(), attributes)

"""A runner: one generation of one model on an edge, with its worker process kept alive.

ONNX Runtime does not give memory back when a session ends, and native code can take its process with it; so each
model version gets a worker process of its own, and is replaced by ending that process. A runner loads every variant
that may run on an edge, measures on this very device what they cost, and then waits for the worker's end to do it
again; states, backoff and crash loops are `tidegate/workers/supervised.py`. A restarted worker is only warmed: what
its calls cost is known from the first incarnation.

While there is no worker, calls fail with Unreachable at once: the gateway has other places, and a device that holds
requests until it may be well again makes them all late. Calls that were inside the dead worker fail the same way,
through it. The state says so as soon as the worker has died, not when its process is reaped.

A model that generates has many generations in its worker at a time, which the runner lets begin
(`tidegate/serving/generation`); a worker that is silent while it owes them tokens is ended as well
(`tidegate/workers/generation/sequence_watchdog.py`).

A worker that is silent during one call for longer than such calls can take (`tidegate/workers/watchdog.py`), without
computing, is taken as hung and ended, which is a death like others; after `hang_timeout_s` one that computes is, too.

Where the device has something beside its processor, its ONNX variants try it before they load for the first time, and
use it where it is right and faster (`tidegate/workers/warming/device_trial.py`). Two workers that are lost there in one
life, and the variants are back on the processor.

Source: docs/design/edge-state.md, "One worker process per generation" (memory, #26831) and "Rollouts and crash loops".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Protocol, Self

import structlog
from numpy.typing import NDArray

from tidegate import clock
from tidegate.engines.generation.limits import cache_limit_bytes, limits_of
from tidegate.estimate.cost_table import CostTable
from tidegate.estimate.service_time import ServiceTime
from tidegate.fleet.offers import ModelOffer, ModelState, VariantOffer
from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import Generated
from tidegate.metrics.generated import GeneratedCounts
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.packing import packing_of
from tidegate.outcome import Unreachable
from tidegate.pipeline.config import default_steps
from tidegate.pipeline.plan import WasmLimits, plan_of
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.serving.generation.generating_variant import GeneratingVariant
from tidegate.serving.generation.sequence_queue import SequenceQueue
from tidegate.serving.generation.sequence_scheduler import SequenceScheduler
from tidegate.token_sink import TokenSink
from tidegate.workers.call_watchdog import CallWatchdog
from tidegate.workers.generation.sequence_watchdog import SequenceWatchdog, SilentWorker
from tidegate.workers.generation.warmup import SequenceComputer
from tidegate.workers.incarnation import Incarnation
from tidegate.workers.lost_workers import LostWorkers, report_of
from tidegate.workers.process import ComputeResult, EngineSpec, LoadResult, WorkerDied
from tidegate.workers.supervised import SupervisedWorker
from tidegate.workers.warming.device_choice import PROCESSOR, DeviceChoice
from tidegate.workers.warming.device_trial import DeviceTrials
from tidegate.workers.warming.warmup_samples import run_samples
from tidegate.workers.warmup import CostPoints

log = structlog.get_logger(__name__)

_MOST_LOST_ON_DEVICE = 2

Arrays = Mapping[str, NDArray[Any]]


class EngineWorker(SequenceComputer, SilentWorker, Protocol):
    """The part of `tidegate.workers.process.WorkerProcess` that a runner uses."""

    @property
    def alive(self) -> bool: ...
    async def load(self, spec: EngineSpec) -> LoadResult: ...
    async def infer(self, key: str, inputs: Arrays, *, budget_s: float | None = None) -> ComputeResult: ...
    async def died(self) -> str: ...
    @property
    def awake_s(self) -> float: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def collected_s(self) -> float: ...


StartWorker = Callable[[str], AbstractAsyncContextManager[EngineWorker]]
Measure = Callable[[EngineWorker, str, Manifest, Variant], Awaitable[CostPoints]]
Warm = Callable[[EngineWorker, str, Manifest, Variant, CostTable], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EdgeLoadable:
    """A variant that may run here, with its verified artefact."""

    variant: Variant
    artefact: Path


@dataclass(frozen=True, slots=True)
class EdgeSequences:
    """What each model that generates may take on this device, and where its tokens are counted."""

    counts: GeneratedCounts
    max_waiting: int = 64
    cache_bytes: int | None = None  # of the attention caches of a model's variant; None: `cache_limit_bytes`


class Runner:
    """Alive inside `async with`, which returns once the model is ready.

    Args:
        start_worker: makes a worker process of a name; entered for each incarnation.
        measure, warm: first and later warm-ups (`tidegate.workers.warmup`).
        on_change: called after each change of `state`.
        generation: tells runners of one version apart, where models are rolled out; 0: of the static repository.
        sandbox: what its workers' sandbox lacks, "" for nothing (`tidegate/workers/sandbox_check.py`); offered so.
        sequences: what a model that generates may take here; None: as many as its engine has slots for.
        step_limits: what a WebAssembly step of its pipeline may take; None: the defaults.
        trials: tries what the device has beside its processor; None: it has nothing.
    """

    def __init__(
        self,
        manifest: Manifest,
        loadables: Sequence[EdgeLoadable],
        *,
        start_worker: StartWorker,
        measure: Measure,
        warm: Warm,
        backoff: Backoff,
        on_change: Callable[[Runner], None] = lambda _: None,
        threads: int = 1,
        paced_slow: float = 1.0,
        hang_timeout_s: float = 30.0,
        generation: int = 0,
        sandbox: str | None = None,
        sequences: EdgeSequences | None = None,
        step_limits: WasmLimits | None = None,
        trials: DeviceTrials | None = None,
    ) -> None:
        self.manifest = manifest
        self.generation = generation
        self._sandbox = sandbox
        self.exits = 0  # of its workers, since it was entered
        self.last_exit = ""
        self.lost_workers = LostWorkers()
        self._loadables = tuple(loadables)
        self._measure = measure
        self._warm = warm
        self._on_change = on_change
        self._threads = threads
        self._paced_slow = paced_slow
        self._hang_timeout_s = hang_timeout_s
        self._trials = trials
        self.devices: dict[str, DeviceChoice] = {}  # by variant, of those that were tried elsewhere than here
        self._lost_on_device = 0
        self._times: dict[str, ServiceTime] = {}
        self._unwanted = asyncio.Event()  # the worker is to be ended, ...
        self._why_unwanted = ""  # ... and why
        self._planned = False  # ... for something else than a fault
        self._calls: dict[object, tuple[float, float]] = {}  # under way: begin, and half of the patience
        self._task: asyncio.Task[None] | None = None
        self._sequences = sequences or EdgeSequences(GeneratedCounts())
        self._step_limits = step_limits or default_steps().limits
        self._slots: dict[str, int] = {}  # of each generating variant, as its engine has loaded
        self._watchdog: SequenceWatchdog | None = None  # of the worker that serves
        self.generating = {one.name: self._generating(one) for one in self.variants if manifest.generative is not None}
        self._supervised = SupervisedWorker[EngineWorker](
            self,
            start=start_worker,
            name_of=lambda number: f"{self.name}/{number}",
            backoff=backoff,
            cannot_start=f"model {self.name!r} cannot be served",
        )

    @property
    def name(self) -> str:
        which = f"{self.manifest.name}:{self.manifest.version}"
        return f"{which}@{self.generation}" if self.generation else which

    @property
    def state(self) -> ModelState:
        return self._supervised.state

    @property
    def folder(self) -> Path:
        """Where its version's files are."""
        return self._loadables[0].artefact.parent

    @property
    def restarts(self) -> int:
        """Workers after the first."""
        return max(0, self._supervised.count - 1)

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(loadable.variant for loadable in self._loadables)

    async def __aenter__(self) -> Self:
        if any(variant.paced for variant in self.variants):
            log.warning("nothing is computed: the model is paced, and answers with zeros", model=self.name)
        self._task = asyncio.create_task(self._supervised.live(), name=f"runner {self.name}")
        first_ready = asyncio.create_task(self._supervised.ready_once.wait(), name=f"start of {self.name}")
        try:
            await asyncio.wait((self._task, first_ready), return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
        except BaseException:
            await self._stop()
            raise
        finally:
            await cancel_and_wait(first_ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def park(self) -> None:
        """End the worker and its supervision; the model stays `loading` for its callers."""
        await self._stop()
        self._supervised.become("loading")

    async def failed(self) -> None:
        """Wait for the end of the supervision itself, which only a defect brings: raises it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def service_time(self, variant: str) -> ServiceTime:
        """What a variant costs here; it learns from `record`. Only after the model was ready once."""
        return self._times[variant]

    def offer(self) -> ModelOffer:
        """What gateways hear of this model, with the costs as measured at warm-up."""
        offers = tuple(self._variant_offer(variant) for variant in self.variants)
        return ModelOffer(
            self.manifest.name,
            self.manifest.version,
            offers,
            state=self.state,
            digest=self.manifest.digest_of(self.variants[0]),
            worker=report_of([self.lost_workers]),
            sandbox=self._sandbox,
        )

    def bound(self, *, hang_timeout_s: float, max_waiting: int) -> None:
        """Be patient for so long, and let so many generations wait, from the next call and the next worker on."""
        self._hang_timeout_s = hang_timeout_s
        self._sequences = replace(self._sequences, max_waiting=max_waiting)
        for one in self.generating.values():
            one.scheduler.resize(max_waiting)

    @property
    def loadables(self) -> tuple[EdgeLoadable, ...]:
        return self._loadables

    def told(self, now: float) -> dict[str, Any]:
        """Its worker's part of `GET /v1/state`, which `edge_agent/core/diagnosis.py` judges."""
        lost = self.lost_workers
        tried = {name: {"device": one.device, "tried": one.reasons} for name, one in self.devices.items()}
        return {
            "model": self.name,
            "state": self.state,
            "overdue_s": round(self.overdue_s(now), 3),
            "slowness": round(self.slowness(), 3),
            "lost": lost.count,
            "lost_ago_s": round(now - lost.at, 1) if lost.count else 0.0,
            "reason": lost.reason,
            **({"devices": tried} if tried else {}),
        }

    def overdue_s(self, now: float) -> float:
        """How long its worker has been silent where half of the patience with it is over; 0 where it is not."""
        sequences_s = 0.0 if self._watchdog is None else self._watchdog.overdue_s
        calls_s = [now - began_at for began_at, half_s in self._calls.values() if now - began_at > half_s]
        return max([0.0, sequences_s, *calls_s])

    def slowness(self) -> float:
        """How many times longer than at its warm-up its variants take, of the one that is most; 1 is as measured.

        Of those that generate it says nothing: they are slower by how many sequences they are at.
        """
        plain = [time for name, time in self._times.items() if name not in self.generating]
        return max([1.0, *(time.residual.factor for time in plain)])

    async def infer(
        self, variant: str, inputs: Arrays, patience_s: float = inf, *, budget_s: float | None = None
    ) -> ComputeResult:
        """Compute with one variant. A worker that is silent for `patience_s` is ended and replaced.

        Args:
            budget_s: what is left of the request's, for the steps of a pipeline; None: nobody said.

        Raises:
            InvalidRequest: a step of the pipeline cannot do this request.
            Unreachable: there is no worker now, or it died or hung during this call.
            InternalError: the engine raised.
        """
        worker = self._worker
        if worker is None or not worker.alive:
            raise Unreachable(self.unready())
        within_s, began_at = min(patience_s, self._hang_timeout_s), clock.now()
        call = object()
        self._calls[call] = began_at, 0.5 * within_s
        try:
            async with asyncio.timeout(None) as limit:
                watchdog = CallWatchdog(limit, within_s, lambda: worker.awake_s, most_s=self._hang_timeout_s)
                try:
                    return await worker.infer(variant, inputs, budget_s=budget_s)
                finally:
                    watchdog.end()
        except WorkerDied as error:
            raise Unreachable(f"model {self.name!r}: {error.message}") from error
        except TimeoutError as error:
            hung = f"hung for {round(clock.now() - began_at, 1):g} s"
            if self._worker is worker:
                self.recycle(hung, planned=False)
            message = f"model {self.name!r}: its worker {hung} and is restarted"
            raise Unreachable(message) from error
        finally:
            del self._calls[call]

    async def generate(
        self,
        place: str,
        variant: str,
        request: GenerateRequest,
        sink: TokenSink | None,
        *,
        token_interval_s: float,
        first_token_s: float,
    ) -> Generated:
        """Generate with one variant on the worker of this name, beside those that a scheduler has let begin.

        Raises:
            Unreachable: that worker is gone, or it died or hung during this call.
            InternalError: the engine failed on it.
        """
        incarnation, watchdog = self._supervised.current, self._watchdog
        worker = self._worker
        if incarnation is None or incarnation.name != place or worker is None or not worker.alive or watchdog is None:
            raise Unreachable(self.unready())
        try:
            async with watchdog.watching():
                return await worker.generate(
                    variant, request, sink, token_interval_s=token_interval_s, first_token_s=first_token_s
                )
        except WorkerDied as error:
            raise Unreachable(f"model {self.name!r}: {error.message}") from error
        except Unreachable as error:
            raise Unreachable(f"model {self.name!r}: {error.message}") from error

    @property
    def place(self) -> str:
        """The name of the worker that serves, which `generate` asks for; "" while there is none."""
        incarnation = self._supervised.current
        return incarnation.name if incarnation is not None and incarnation.serving else ""

    @property
    def pid(self) -> int | None:
        """Of the worker that serves; None while there is none."""
        worker = self._worker
        return worker.pid if worker is not None else None

    @property
    def collected_s(self) -> float:
        """Seconds that the worker that serves spent on garbage collections."""
        worker = self._worker
        return worker.collected_s if worker is not None else 0.0

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def recycle(self, reason: str, *, planned: bool = True) -> None:
        """Have the worker ended and another one started. What is inside it fails, as when it dies.

        Args:
            planned: for another reason than a fault: it is not counted among the lost ones.
        """
        self._why_unwanted, self._planned = reason, planned
        self._unwanted.set()

    def unready(self) -> str:
        """Why it does not answer, for a caller to read."""
        return f"model {self.name!r} is {'restarting' if self.state == 'ready' else self.state} here"

    # what the supervised worker needs of its owner (`tidegate.workers.supervised.WorkerOwner`)

    async def prepare(self, worker: EngineWorker) -> float:
        if self._trials is not None:
            await self._try_devices(self._trials)
        await self._load(worker)
        if not self._times:
            self._supervised.become("warming")
        for variant in self.variants:
            if variant.name in self._times:
                known = self._times[variant.name].table
                await self._warm(worker, variant.name, self.manifest, variant, known)
            else:
                points = await self._measure(worker, variant.name, self.manifest, variant)
                generating = self.generating.get(variant.name)
                self._times[variant.name] = ServiceTime(points) if generating is None else generating.measured(points)
            folder = self._loadables[0].artefact.parent
            await run_samples(worker, variant.name, self.manifest, folder, optional=self.generation > 0)
        self._unwanted.clear()
        return 0.0  # no call waits for a restart here

    async def end_of(self, worker: EngineWorker) -> str:
        """Wait until the worker has died or is not wanted any more."""
        died = asyncio.create_task(worker.died(), name=f"end of {self.name}")
        unwanted = asyncio.create_task(self._unwanted.wait(), name=f"replacement of {self.name}")
        try:
            await asyncio.wait((died, unwanted), return_when=asyncio.FIRST_COMPLETED)
            return died.result() if died.done() else self._why_unwanted
        finally:
            await cancel_and_wait(died, unwanted)

    def serve(self, incarnation: Incarnation[EngineWorker]) -> None:
        """Let generations begin; `infer` uses the incarnation that serves."""
        if not self.generating:
            return
        worker = incarnation.worker
        assert worker is not None
        self._watchdog = SequenceWatchdog(
            worker,
            limit_s=self._hang_timeout_s,
            excused_s=lambda: worker.awake_s,
            on_hung=lambda silent_s: self._hung(worker, silent_s),
            excused_to_limit=True,
        )
        for name, one in self.generating.items():
            limit_bytes = cache_limit_bytes(self.manifest, one.variant, self._sequences.cache_bytes)
            one.scheduler.open(incarnation.name, slots=self._slots[name], limit_bytes=limit_bytes)

    def back(self, incarnation: Incarnation[EngineWorker]) -> None:
        log.info("worker back", model=self.name)

    def ending(self, incarnation: Incarnation[EngineWorker]) -> None:
        if not (self._unwanted.is_set() and self._planned):
            self.lost_workers.lost(incarnation.reason, clock.now())
        self._supervised.become("loading")  # now and not once it is reaped, which takes a second where it hangs
        for one in self.generating.values():
            one.scheduler.close(incarnation.name, self.unready())

    def lost(self, incarnation: Incarnation[EngineWorker]) -> None:
        self.exits, self.last_exit = self.exits + 1, incarnation.reason
        if all(one.device == PROCESSOR for one in self.devices.values()):
            return
        self._lost_on_device += 1
        if self._lost_on_device >= _MOST_LOST_ON_DEVICE:
            words = f"left out: {self._lost_on_device} workers were lost on it, the last one {incarnation.reason}"
            for name, one in self.devices.items():
                if one.device != PROCESSOR:
                    self.devices[name] = DeviceChoice(reasons=(f"{one.device}: {words}",))
            self._times.clear()  # its costs are others on the processor
            log.warning("back on the processor", model=self.name, reason=words)

    def restarting(self, incarnation: Incarnation[EngineWorker], delay_s: float) -> None:
        words = {"model": self.name, "reason": incarnation.reason, "restart_in_s": round(delay_s, 3)}
        log.warning("worker lost", **words, state=self.state)

    async def retire(self, incarnation: Incarnation[EngineWorker]) -> None:
        """Nothing: an edge replaces a worker by ending it (`recycle`), or by another runner."""

    def successor_lost(self, incarnation: Incarnation[EngineWorker], successor: Incarnation[EngineWorker]) -> None:
        """Nothing: as `retire`."""

    def changed(self) -> None:
        self._on_change(self)

    @property
    def _worker(self) -> EngineWorker | None:
        """The worker that serves."""
        incarnation = self._supervised.current
        return incarnation.worker if incarnation is not None and incarnation.serving else None

    async def _try_devices(self, trials: DeviceTrials) -> None:
        """Of variants that were not tried before; a worker that is started again goes by the first one's choice."""
        for loadable in self._loadables:
            variant = loadable.variant
            if variant.engine == "onnx" and variant.name not in self.devices:
                spec = replace(self._spec(loadable), steps=None)
                self.devices[variant.name] = await trials.choose(self.manifest.of_model, variant, spec)

    async def _load(self, worker: EngineWorker) -> None:
        for loadable in self._loadables:
            loaded = await worker.load(self._spec(loadable))
            self._slots[loadable.variant.name] = loaded.slots

    def _spec(self, loadable: EdgeLoadable) -> EngineSpec:
        """What a worker loads for a variant."""
        artefacts, variant = self.manifest.of_model, loadable.variant
        chosen = self.devices.get(variant.name)
        return EngineSpec(
            variant.name,
            variant.engine,
            loadable.artefact,
            tuple(spec.name for spec in artefacts.outputs),
            self._threads,
            PROCESSOR if chosen is None else chosen.device,
            paced_slow=self._paced_slow,
            packing=packing_of(artefacts, variant.packed),
            compile=variant.compile,
            generation=limits_of(self.manifest, variant, cache_bytes=self._sequences.cache_bytes or 0),
            steps=plan_of(self.manifest, str(self.folder), self._step_limits),
            sha256=variant.sha256,
        )

    def _generating(self, variant: Variant) -> GeneratingVariant:
        scheduler = SequenceScheduler(SequenceQueue(max_size=self._sequences.max_waiting))
        return GeneratingVariant(self.manifest, variant, scheduler, self, self._sequences.counts)

    def _hung(self, worker: EngineWorker, silent_s: float) -> None:
        if self._worker is worker:
            self.recycle(f"hung for {round(silent_s, 1):g} s", planned=False)

    def _variant_offer(self, variant: Variant) -> VariantOffer:
        time = self._times.get(variant.name)
        return VariantOffer(
            variant.name,
            variant.precision,
            cost=tuple(time.table.points) if time is not None else (),
            max_batch=variant.max_batch,
            max_tokens=variant.max_tokens,
            quality=variant.quality.value if variant.quality is not None else None,
            paced=variant.paced,
            slots=self._slots.get(variant.name, 0),
            schemas=variant.follows_schemas,
        )

    async def _stop(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)

    def __repr__(self) -> str:
        return f"<Runner {self.name} {self.state} life {self._supervised.count}>"

"""The supervisor runs the pool's workers, each in a replica of its own, and measures what each variant costs.

The first replica starts first and measures what every variant costs here, undisturbed; then the others start together.
The pool is ready when every replica has been ready once, and stays ready for as long as one is: a worker that dies
touches only its own batch (`replica.py`), and the others take over what waits.

One model that no worker loads, or that fails on its own warm-up samples, need not keep the others away: where the owner
wants that (`leave_out`), it is left out at the first start of the first worker, and told. So is one at which that
worker dies or hangs, and another worker starts with the others; and one that does not fit into the device's memory
beside those before it. Later, where its file may have been damaged since, a model is left out at which two workers in a
row could not start, while no other one serves: it would keep all models away.

While there is no worker at all the scheduler holds the requests that can wait and refuses the others
(`PoolScheduler.detach`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, Self

import structlog

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.core.sharing.worker_layout import WorkerPlace
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.workers.catalogue import check_memory, what_fits
from cloud_pool.workers.device_worker import DeviceWorker, PoolLoadable, StartProcess
from cloud_pool.workers.first_start import start_one, start_others
from cloud_pool.workers.load_priority import LoadPriority
from cloud_pool.workers.memory_limit import NO_LIMIT, MemoryLimit
from cloud_pool.workers.replica import Replica
from tidegate import clock
from tidegate.fleet.offers import ModelState, WorkerReport
from tidegate.models.manifest import Manifest
from tidegate.outcome import InternalError, OutOfMemory, ServeError, Unreachable
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import cancel_and_wait, until_one_ends
from tidegate.runtime.process import StartError
from tidegate.workers.lost_workers import report_of
from tidegate.workers.process import WorkerDied
from tidegate.workers.warming.warmup_samples import run_samples
from tidegate.workers.warmup import CostPoints, measure, warm

_BEST_FIRST: Final[tuple[ModelState, ...]] = ("ready", "warming", "loading", "bad")

PeakObserver = Callable[[float, int], None]
# Of a worker, in so many seconds, with each peak of memory told.
MeasureVariant = Callable[[DeviceWorker, PoolLoadable, float, PeakObserver], Awaitable[CostPoints]]

log = structlog.get_logger(__name__)


async def measure_anew(
    worker: DeviceWorker, loadable: PoolLoadable, budget_s: float, on_peak: PeakObserver
) -> CostPoints:
    return await measure(
        worker,
        loadable.key,
        loadable.manifest,
        loadable.variant,
        budget_s=budget_s,
        on_peak=on_peak,
        starved_s=lambda: worker.starved_s,
    )


class PoolSupervisor:
    """Alive inside `async with`, which returns once every model is warm on a worker, and each worker was tried.

    Args:
        places: one worker for each; the last `standby` of them are a reserve.
        start_process: makes a worker process of a name on some cores; entered for each incarnation.
        new_backoff: makes the waits between the incarnations of one replica.
        memory_limit: of each device; what cannot fit is refused before it is loaded.
        warmup_budget_s: for measuring, shared by all variants.
        on_change: called after each change of `state`.
        on_lost: called when a worker was lost, whether others serve on or not.
        on_progress: called with words for what a start is at.
        model: the supervisor is of this one alone, beside others with the same places; "": it is of all models.
        load_priority: sets workers back that were lowered when they were started; None: none are.
        known: model instances of before, with what their work costs and takes: they are warmed and not measured.
        measuring: measures what a variant costs, or has it from before.
        leave_out: told of a model that cannot be loaded or warmed, and why; None: that is a reason not to start, and
            to try again later.
        sandbox: what the workers' sandbox lacks, "" for nothing (`tidegate/workers/sandbox_check.py`); offered so.
    """

    def __init__(
        self,
        loadables: Sequence[PoolLoadable],
        scheduler: PoolScheduler,
        *,
        start_process: StartProcess,
        new_backoff: Callable[[], Backoff],
        places: Sequence[WorkerPlace] = (WorkerPlace("0"),),
        standby: int = 0,
        paced_slow: float = 1.0,
        hang_timeout_s: float = 30.0,
        memory_limit: MemoryLimit = NO_LIMIT,
        warmup_budget_s: float = 10.0,
        on_change: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
        on_progress: Callable[[str], None] = lambda _: None,
        model: str = "",
        load_priority: LoadPriority | None = None,
        known: Mapping[str, ModelInstance] | None = None,
        measuring: MeasureVariant = measure_anew,
        leave_out: Callable[[Manifest, str], None] | None = None,
        sandbox: str | None = None,
    ) -> None:
        self.sandbox = sandbox
        self.lanes: dict[str, ModelInstance] = {}
        self.load_s = 0.0  # that the last worker took until it was warm
        self.cold_s = 0.0  # its models are not loaded on demand, as far as it knows
        self._known = dict(known or {})
        self._measuring = measuring
        self._load_priority = load_priority
        self._leave_out = leave_out
        self._has_started = False  # some worker was warm with what is left
        self._failed_last: Manifest | None = None  # since a worker was warm: at which model the last one was not
        self._loadables = tuple(loadables)
        self._scheduler = scheduler
        self._memory_limit = memory_limit
        self._warmup_budget_s = warmup_budget_s
        self._on_change = on_change
        self._on_progress = on_progress
        self._reported: ModelState = "loading"
        self._tasks: list[asyncio.Task[None]] = []
        self.slots = tuple(
            Replica(
                place,
                scheduler,
                start_process=start_process,
                prepare=self._prepare,
                backoff=new_backoff(),
                standby=n >= len(places) - standby,
                lanes=frozenset(one.key for one in loadables) if model else None,
                prefix=f"{model}/" if model else "",
                paced_slow=paced_slow,
                hang_timeout_s=hang_timeout_s,
                memory_limit=memory_limit,
                on_change=self._report,
                on_lost=on_lost,
            )
            for n, place in enumerate(places)
        )

    @property
    def state(self) -> ModelState:
        """The best state of any replica; ready where there is nothing to serve."""
        return min((slot.state for slot in self.slots), key=_BEST_FIRST.index, default="ready")

    @property
    def worker_report(self) -> WorkerReport | None:
        """What gateways hear of the workers that were lost; None where none was."""
        return report_of([slot.lost_workers for slot in self.slots])

    async def __aenter__(self) -> Self:
        try:
            await start_others(await self._start_one(), self._tasks)
        except BaseException:
            await cancel_and_wait(*self._tasks)
            for key in self.lanes:  # some worker was warm
                self._scheduler.shut(key, Unreachable("its workers were not started"))
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(*self._tasks)

    async def leave(self, reason: str) -> None:
        """Let the workers finish what they compute, and take no more requests: what still waits is refused."""
        for loadable in self._loadables:
            self._scheduler.shut(loadable.key, Unreachable(reason))
        for slot in self.slots:
            await slot.leave(reason)

    async def failed(self) -> None:
        """Wait for the end of a supervision itself, which only a defect brings: raises it."""
        await until_one_ends(self._tasks)

    async def _start_one(self) -> list[Replica]:
        """Start one worker, again and again where it dies of a model that is left out; returns the other replicas.

        Raises StartError: none comes up.
        """
        while True:
            wanted = self._loadables
            try:
                return await start_one(self.slots, self._tasks)
            except StartError:
                if self._loadables == wanted:
                    raise

    async def _prepare(self, worker: DeviceWorker, on_warming: Callable[[], None]) -> float:
        """Load and warm everything; returns the seconds that a later incarnation should need for it."""
        try:
            return await self._prepare_all(worker, on_warming)
        finally:
            if self._load_priority is not None:
                self._load_priority.restore(worker.pid)

    async def _prepare_all(self, worker: DeviceWorker, on_warming: Callable[[], None]) -> float:
        began_at = clock.now()
        await self._each(worker, self._load)
        loaded_s = clock.now() - began_at
        if not self.lanes:
            on_warming()
        await self._each(worker, self._warm)
        self._has_started, self._failed_last = True, None
        self.load_s = clock.now() - began_at
        return loaded_s

    async def _each(self, worker: DeviceWorker, step: Callable[[DeviceWorker, PoolLoadable], Awaitable[None]]) -> None:
        for loadable in self._loadables:
            if loadable not in self._loadables:
                continue  # its model was left out for another variant
            try:
                await step(worker, loadable)
            except (InternalError, OutOfMemory) as error:
                if not self._is_to_be_left_out(loadable.manifest):
                    raise
                self._drop(loadable.manifest, error)
            except WorkerDied as error:
                if self._is_to_be_left_out(loadable.manifest):
                    self._drop(loadable.manifest, error)
                raise

    def _is_to_be_left_out(self, manifest: Manifest) -> bool:
        """Whether a model at which a worker could not start is had no longer. Takes note of it."""
        if self._leave_out is None or not self._has_started:
            return self._leave_out is not None
        is_again, self._failed_last = manifest == self._failed_last, manifest
        return is_again and self.state != "ready"

    def _drop(self, manifest: Manifest, error: ServeError) -> None:
        """Have a model no longer, in any variant, and tell of it."""
        assert self._leave_out is not None  # its callers have looked
        self.discard(manifest, error)
        self._leave_out(manifest, error.message)

    def discard(self, manifest: Manifest, error: ServeError) -> None:
        """Have a model no longer, in any variant: what waits for it ends with the error. Workers of later have none
        of it; those that are there keep it in memory."""
        for one in self._loadables:
            if one.manifest == manifest and self.lanes.pop(one.key, None) is not None:
                self._scheduler.shut(one.key, error)
        self._loadables = tuple(one for one in self._loadables if one.manifest != manifest)

    async def _load(self, worker: DeviceWorker, loadable: PoolLoadable) -> None:
        self._on_progress(f"loading {loadable.key}")
        loaded = await worker.load(loadable)
        if loaded.device_bytes is not None:
            self._check_memory(self._memory_limit.of(loaded.device_bytes), worker.memory_of)

    def _check_memory(self, limit_bytes: float, device: str) -> None:
        """Leave out what does not fit into the device's own memory, or raise StartError where nothing is left out."""
        check = partial(check_memory, workers=1, limit_bytes=limit_bytes, device=device)
        if self._leave_out is None or self._has_started:
            check(self._loadables)
            return
        for manifest, why in what_fits(self._loadables, check)[1]:
            self._drop(manifest, OutOfMemory(why))

    async def _warm(self, worker: DeviceWorker, loadable: PoolLoadable) -> None:
        key, manifest, variant = loadable.key, loadable.manifest, loadable.variant
        lane = self.lanes.get(key) or self._known.get(key)
        if lane is not None:
            await warm(worker, key, manifest, variant, lane.service.table, starved_s=lambda: worker.starved_s)
            await run_samples(worker, key, manifest, loadable.artefact.parent)
            self._open(lane)
            return
        self._on_progress(f"measuring {key}")
        if variant.paced:
            log.warning("nothing is computed: the model is paced, and answers with zeros", model=key)
        budget_s = self._warmup_budget_s / len(self._loadables)
        peaks = list[tuple[float, int]]()
        cost = await self._measuring(worker, loadable, budget_s, lambda *peak: peaks.append(peak))
        await run_samples(worker, key, manifest, loadable.artefact.parent)
        lane = ModelInstance(key, manifest, variant, cost)
        for units, peak_bytes in peaks:
            lane.memory.footprint.record(units, peak_bytes)
        self._open(lane)

    def _open(self, lane: ModelInstance) -> None:
        if lane.key not in self.lanes:
            self.lanes[lane.key] = lane
            self._scheduler.open(lane)

    def _report(self) -> None:
        if self.state != self._reported:
            self._reported = self.state
            self._on_change()

    def __repr__(self) -> str:
        return f"<PoolSupervisor {self.state}, {len(self._loadables)} variants, {', '.join(map(repr, self.slots))}>"

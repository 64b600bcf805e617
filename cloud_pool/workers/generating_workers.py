"""The generating workers of a pool: for each variant that generates, a replica on each device.

They start after the workers that compute batches, one after another, so that what each costs is measured undisturbed.
A variant is ready for as long as one of its replicas is. One whose worker does not start takes its model with it, and
no other, where the owner wants that (`leave_out`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Self

import structlog

from cloud_pool.core.sharing.worker_layout import WorkerPlace
from cloud_pool.scheduling.device_arbiter import DeviceArbiter
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.first_start import start_one, start_others
from cloud_pool.workers.generating_replica import GeneratingReplica
from cloud_pool.workers.generating_start import WorkerStart
from cloud_pool.workers.memory_limit import NO_LIMIT, MemoryLimit
from tidegate.fleet.offers import ModelState, WorkerReport
from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import Generated
from tidegate.metrics.generated import GeneratedCounts
from tidegate.models.manifest import Manifest
from tidegate.outcome import Unreachable
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import cancel_and_wait, until_one_ends
from tidegate.runtime.process import StartError
from tidegate.serving.generation.generating_variant import GeneratingVariant
from tidegate.serving.generation.sequence_queue import SequenceQueue
from tidegate.serving.generation.sequence_scheduler import SequenceScheduler
from tidegate.token_sink import TokenSink
from tidegate.workers.lost_workers import report_of
from tidegate.workers.process import WorkerDied

_BEST_FIRST: Final[tuple[ModelState, ...]] = ("ready", "warming", "loading", "bad")
log = structlog.get_logger("supervisor")


class VariantWorkers:
    """The replicas of one variant, as the `SequenceWorkers` of its `generating`."""

    def __init__(
        self,
        loadable: PoolLoadable,
        counts: GeneratedCounts,
        replicas: Callable[[GeneratingVariant], Sequence[GeneratingReplica]],
    ) -> None:
        """Args: replicas: makes those of the variant."""
        self.loadable = loadable
        scheduler = SequenceScheduler(SequenceQueue(max_size=loadable.manifest.batching.max_queue_size))
        self.generating = GeneratingVariant(loadable.manifest, loadable.variant, scheduler, self, counts)
        self.replicas = tuple(replicas(self.generating))

    @property
    def state(self) -> ModelState:
        """The best state of any replica."""
        return min((one.state for one in self.replicas), key=_BEST_FIRST.index)

    @property
    def worker_report(self) -> WorkerReport | None:
        """What gateways hear of the workers that were lost; None where none was."""
        return report_of([one.lost_workers for one in self.replicas])

    @property
    def sandboxed(self) -> bool:
        """Whether all workers are in the sandbox, as far as there is one."""
        return all(one.sandboxed for one in self.replicas)

    def unready(self) -> str:
        """Why there is no worker, for a caller to read."""
        return f"{self.loadable.key} is {'restarting' if self.state == 'ready' else self.state} here"

    async def generate(
        self,
        place: str,
        variant: str,
        request: GenerateRequest,
        sink: TokenSink,
        *,
        token_interval_s: float,
        first_token_s: float,
    ) -> Generated:
        """As `WorkerProcess.generate`. Raises Unreachable where the worker is gone, dies or hangs."""
        worker = next((one.workers[place] for one in self.replicas if place in one.workers), None)
        if worker is None or not worker.alive:
            raise Unreachable(self.unready())
        try:
            return await worker.generate(
                self.loadable.key, request, sink, token_interval_s=token_interval_s, first_token_s=first_token_s
            )
        except WorkerDied as error:
            raise Unreachable(f"{self.loadable.key}: {error.message}") from error

    def __repr__(self) -> str:
        return f"<VariantWorkers {self.loadable.key} {self.state}, {', '.join(map(repr, self.replicas))}>"


class GeneratingWorkers:
    """Alive inside `async with`, which returns once every variant is warm on a device, and was tried on each.

    Args:
        places: of each variant, one worker for each.
        start_of: how the worker of a variant on a place is made.
        new_backoff: makes the waits between the incarnations of one replica.
        cache_bytes: of the attention caches of one variant on one device; None: `cache_limit_bytes`.
        warmup_budget_s: for measuring, shared by all variants.
        counts: where tokens are counted; None: in counts of its own.
        leave_out: told of a model whose worker does not start, and why; None: that is a reason not to start.
        on_change, on_lost: as `PoolSupervisor`'s.
    """

    def __init__(
        self,
        loadables: Sequence[PoolLoadable],
        allotment: DeviceArbiter,
        *,
        start_of: Callable[[PoolLoadable, WorkerPlace], WorkerStart],
        new_backoff: Callable[[], Backoff],
        places: Sequence[WorkerPlace] = (WorkerPlace("0"),),
        cache_bytes: int | None = None,
        memory_limit: MemoryLimit = NO_LIMIT,
        paced_slow: float = 1.0,
        hang_timeout_s: float = 30.0,
        warmup_budget_s: float = 10.0,
        counts: GeneratedCounts | None = None,
        leave_out: Callable[[Manifest, str], None] | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.counts = counts or GeneratedCounts()
        self._on_progress = on_progress
        self._leave_out = leave_out
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}  # by the key of the variant

        def replicas_of(loadable: PoolLoadable) -> Callable[[GeneratingVariant], Sequence[GeneratingReplica]]:
            return lambda generating: [
                GeneratingReplica(
                    loadable,
                    place,
                    generating,
                    allotment,
                    start=start_of(loadable, place),
                    backoff=new_backoff(),
                    cache_bytes=cache_bytes,
                    memory_limit=memory_limit,
                    paced_slow=paced_slow,
                    hang_timeout_s=hang_timeout_s,
                    warmup_budget_s=warmup_budget_s / max(1, len(loadables)),
                    on_change=on_change,
                    on_lost=on_lost,
                )
                for place in places
            ]

        self.variants = {one.key: VariantWorkers(one, self.counts, replicas_of(one)) for one in loadables}

    def schedulers(self) -> list[SequenceScheduler]:
        return [one.generating.scheduler for one in self.variants.values()]

    @property
    def replicas(self) -> list[GeneratingReplica]:
        return [replica for one in self.variants.values() for replica in one.replicas]

    async def drained(self) -> None:
        """Wait until no generation waits or runs."""
        await asyncio.gather(*[one.drained() for one in self.schedulers()])

    async def __aenter__(self) -> Self:
        try:
            for key, variant in list(self.variants.items()):
                if key in self.variants:  # its model was not left out for another variant
                    await self._start_or_leave_out(variant)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        await cancel_and_wait(*[task for tasks in self._tasks.values() for task in tasks])

    async def failed(self) -> None:
        """Wait for the end of a supervision itself, which only a defect brings: raises it."""
        await until_one_ends([task for tasks in self._tasks.values() for task in tasks])

    async def _start_or_leave_out(self, variant: VariantWorkers) -> None:
        key, manifest = variant.loadable.key, variant.loadable.manifest
        self._on_progress(f"loading and measuring {key}")
        if variant.loadable.variant.paced:
            log.warning("nothing is computed: the model is paced", model=key)
        try:
            tasks = self._tasks.setdefault(key, [])
            await start_others(await start_one(variant.replicas, tasks), tasks)
        except StartError as error:
            if self._leave_out is None:
                raise
            await self._discard(manifest)
            self._leave_out(manifest, str(error))

    async def _discard(self, manifest: Manifest) -> None:
        """Have a model no longer, in any variant."""
        for key in [key for key, one in self.variants.items() if one.loadable.manifest == manifest]:
            del self.variants[key]
            await cancel_and_wait(*self._tasks.pop(key, ()))

    def __repr__(self) -> str:
        return f"<GeneratingWorkers {', '.join(map(repr, self.variants.values()))}>"

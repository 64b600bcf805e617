"""The pool's model: the variants of one version behind the common pipeline, each a model instance in the scheduler.

A request of more rows than a batch holds is run in parts, so that a variant's limits here are on the length of a row
only. Requests of one sequence find its state (`sequence_state.py`); equal requests share a place in the queue where
the manifest allows it (`coalescing.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from numpy.typing import NDArray

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.scheduling.job import PoolRequest, PoolResult
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.serving.coalescing import Coalescer, Submit
from cloud_pool.serving.sequence_state import SequenceStates
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.model_workers import ModelWorkers
from cloud_pool.workers.steps_worker import StepsWorker
from tidegate import clock
from tidegate.fleet.offers import ModelOffer, ModelState, Standing, VariantOffer
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.work import Work, fits, work_of_arrays
from tidegate.oip.host import ModelStatistics, TimedCount
from tidegate.oip.sequence import sequence_of
from tidegate.outcome import DeadlineExceeded, NotSupported
from tidegate.serving.target_model import Computation, Computed
from tidegate.types import Call
from tidegate.workers.warmup import CostPoints

# Of a model's name and a request's deadline: what the request waits for, None where the model is in memory.
Hold = Callable[[str, float], asyncio.Future[None] | None]


@dataclass(frozen=True, slots=True)
class VariantRelief:
    """Which variants answer in place of fuller ones, and when.

    Args:
        precision: of the lesser variants, which answer requests without a demand while `active()`; "" is none.
        spare: whether the lesser variants answer demands only, at other times.
    """

    precision: str = ""
    spare: bool = False
    active: Callable[[], bool] = lambda: False

    def is_lesser(self, variant: Variant) -> bool:
        return variant.precision == self.precision


class PoolModel:
    """A `TargetModel` over the loadable variants of one version; the first of them answers when none is demanded."""

    def __init__(
        self,
        server_name: str,
        loadables: Sequence[PoolLoadable],
        scheduler: PoolScheduler,
        supervisor: ModelWorkers,
        *,
        sequences: SequenceStates,
        coalescer: Coalescer,
        relief: VariantRelief,
        hold: Hold | None = None,
        steps: StepsWorker | None = None,
    ) -> None:
        self._hold = hold
        self._steps = steps
        self._server_name = server_name
        self._by_variant = {loadable.variant.name: loadable for loadable in loadables}
        self._variants = tuple(loadable.variant for loadable in loadables)
        self._manifest = loadables[0].manifest if steps is None else steps.manifest
        self._artefacts = loadables[0].manifest  # from their side
        self._scheduler = scheduler
        self._supervisor = supervisor
        self._sequences = sequences
        self._coalescer = coalescer
        self._relief = relief
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def emptied(self) -> None:
        """Wait until no call is inside."""
        await self._idle.wait()

    @property
    def label(self) -> str:
        return self._manifest.name

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def variants(self) -> Sequence[Variant]:
        return self._variants

    @property
    def ready(self) -> bool:
        if self._supervisor.cold_s > 0.0:
            return True  # it comes into memory when it is asked for, and its steps with it
        return self._supervisor.state == "ready" and (self._steps is None or self._steps.state == "ready")

    def offer(self) -> ModelOffer:
        variants = tuple(
            _variant_offer(one.variant, self._cost_of(one.key), self._standing(one.variant))
            for one in self._by_variant.values()
        )
        return ModelOffer(
            self._manifest.name,
            self._manifest.version,
            variants,
            state=self._state,
            digest=self._manifest.digest_of(self._variants[0]),
            worker=self._supervisor.worker_report,
            sandbox=self._supervisor.sandbox,
            cold_s=round(self._supervisor.cold_s, 3),
        )

    @property
    def _state(self) -> ModelState:
        state = self._supervisor.state
        return self._steps.state if self._steps is not None and state == "ready" else state

    def _cost_of(self, key: str) -> CostPoints:
        """What a variant costs here, by the caller's work."""
        instance = self._supervisor.lanes.get(key)
        cost = () if instance is None else instance.cost
        return cost if self._steps is None else self._steps.offered_cost(cost)

    def statistics(self) -> ModelStatistics:
        instances = [self._supervisor.lanes.get(one.key) for one in self._by_variant.values()]
        parts = [instance.statistics for instance in instances if instance is not None]
        return _merged(ModelStatistics(self._manifest.name, self._manifest.version), parts)

    def choose(self, variants: Sequence[Variant], work: Work, demanded: str) -> Variant:
        """The first variant that takes the work, lesser variants before the others while they relieve those."""
        if not demanded and self._relief.active():
            variants = sorted(variants, key=lambda one: not self._relief.is_lesser(one))
        # Rows are no limit here: a request of many is run in parts.
        for one in variants:
            if fits(work, max_batch=None, max_tokens=one.max_tokens):
                return one
        limits = ", ".join(f"{one.name} up to {one.max_tokens}" for one in variants)
        raise NotSupported(
            f"{self.label!r} on {self._server_name} takes no rows of {work.longest_row} (max_tokens: {limits})"
        )

    async def compute(self, computation: Computation) -> Computed:
        """Wait for a turn in a batch, with the state of the request's sequence.

        Raises:
            InvalidRequest, Overloaded: by `cloud_pool/core/batching/sequences.py`, for a sequence's step.
            Overloaded, DeadlineExceeded: by `cloud_pool/core/batching/batcher.py`.
            DeadlineExceeded: the model is not in memory, and not in time either.
            Unreachable: there is no worker and no time to wait for one.
            InternalError: the engine raised.
            ServeError: as `StepsWorker.before` and `after` say, of a model with a pipeline.
        """
        comes = None if self._hold is None else self._hold(self._manifest.name, computation.deadline)
        if comes is None:
            self.enter()
        else:
            await self._entered(comes, computation.deadline)
        try:
            return await self._compute(computation)
        finally:
            self.leave()

    def enter(self) -> None:
        """Count one more call inside; also called for one that waits, in the instant in which its model is there."""
        self._calls += 1
        self._idle.clear()

    def leave(self) -> None:
        self._calls -= 1
        if not self._calls:
            self._idle.set()

    async def _entered(self, comes: asyncio.Future[None], deadline: float) -> None:
        """Wait for a model that comes in; the call is inside then.

        Raises:
            DeadlineExceeded: it did not come in in time. Unreachable: it did not come in at all.
        """
        try:
            await asyncio.wait((comes,), timeout=max(0.0, deadline - clock.now()))
        except asyncio.CancelledError:
            if not comes.cancel() and not comes.cancelled() and comes.exception() is None:
                self.leave()
            raise
        if comes.cancel():
            raise DeadlineExceeded("its model did not come into memory in time")
        comes.result()

    async def _compute(self, computation: Computation) -> Computed:
        steps = self._steps
        if steps is None:
            return await self._batched(computation)
        prepared = await steps.before(computation.arrays, computation.deadline)
        work = work_of_arrays(self._artefacts, prepared.inputs)
        if not fits(work, max_batch=None, max_tokens=computation.variant.max_tokens):
            variant = computation.variant
            raise NotSupported(f"a row of {work.longest_row} tokens; {variant.name} takes at most {variant.max_tokens}")
        computed = await self._batched(replace(computation, arrays=prepared.inputs, work=work))
        outputs, after_s = await steps.after(computed.outputs, prepared.kept, computation.deadline)
        return replace(computed, outputs=outputs, compute_s=computed.compute_s + prepared.took_s + after_s)

    async def _batched(self, computation: Computation) -> Computed:
        """The artefacts' outputs for their inputs."""
        call, variant = computation.call, computation.variant
        key = self._by_variant[variant.name].key

        def run(arrays: dict[str, NDArray[Any]]) -> Awaitable[PoolResult]:
            ask = PoolRequest(
                arrays,
                computation.work.units,
                call.arrived_at,
                computation.deadline,
                call.priority,
                call.on_accepted,
                trace=computation.trace,
            )
            return self._counted(key, ask)

        if self._manifest.sequence is None:  # nothing is remembered
            answer = await run(computation.arrays)
        else:
            parameters = call.request.parameters
            answer = await self._sequences.remembering(self, self._manifest, parameters, computation.arrays, run)
        return Computed(
            answer.outputs,
            answer.queue_s,
            answer.compute_s,
            answer.batch_rows,
            batch_wait_s=answer.batch_wait_s,
            degraded=not call.variant and variant is not self._variants[0] and self._relief.is_lesser(variant),
            withheld=self._withheld(call),
        )

    def ended(self, took_s: float, error: BaseException | None) -> None:
        """Nothing: what the scheduler answered is counted for each model instance, and nothing else."""

    async def _counted(self, key: str, ask: PoolRequest) -> PoolResult:
        """The scheduler's answer, or its error, in the statistics. A caller that leaves is neither."""
        began_at = clock.now()
        instance = self._supervisor.lanes.get(key)
        try:
            answer = await self._submit(instance)(key, ask)
        except Exception:
            if instance is not None:
                instance.statistics.fail.add(clock.now() - began_at)
            raise
        if instance is not None:
            instance.statistics.success.add(clock.now() - began_at)
            instance.statistics.queue.add(answer.queue_s)
            instance.statistics.compute_infer.add(answer.compute_s)
        return answer

    def _submit(self, instance: ModelInstance | None) -> Submit:
        coalesce = instance is not None and instance.manifest.batching.coalesce
        return self._coalescer.submit if coalesce else self._scheduler.submit

    def _withheld(self, call: Call) -> frozenset[str]:
        """The outputs that are the state of the call's sequence, which the pool keeps."""
        kept = self._manifest.sequence
        if kept is None or not sequence_of(call.request.parameters):
            return frozenset()
        return frozenset(kept.state_inputs.values())

    def _standing(self, variant: Variant) -> Standing:
        """Which requests a variant answers now, if any but those that demand it."""
        relief = self._relief
        lesser = [relief.is_lesser(one) for one in self._variants]
        if not any(lesser) or lesser[0]:  # a model with nothing lesser, or with nothing fuller
            return ""
        if relief.is_lesser(variant):
            return "relief" if relief.active() else "spare" if relief.spare else ""
        return "relieved" if relief.active() else ""

    def __repr__(self) -> str:
        return f"<PoolModel {self._manifest.name}:{self._manifest.version} {', '.join(self._by_variant)}>"


def _variant_offer(variant: Variant, cost: CostPoints, standing: Standing) -> VariantOffer:
    return VariantOffer(
        variant.name,
        variant.precision,
        cost=cost,
        max_batch=None,  # more rows than a batch holds are run in parts
        max_tokens=variant.max_tokens,
        quality=variant.quality.value if variant.quality is not None else None,
        paced=variant.paced,
        standing=standing,
    )


def _merged(total: ModelStatistics, parts: Sequence[ModelStatistics]) -> ModelStatistics:
    """The sum of the statistics of a model's variants."""
    for part in parts:
        total.last_inference_ms = max(total.last_inference_ms, part.last_inference_ms)
        total.inference_count += part.inference_count
        total.execution_count += part.execution_count
        for into, tally in (
            (total.success, part.success),
            (total.fail, part.fail),
            (total.queue, part.queue),
            (total.compute_infer, part.compute_infer),
            *((total.batches.setdefault(rows, TimedCount()), tally) for rows, tally in part.batches.items()),
        ):
            into.count += tally.count
            into.ns += tally.ns
    return total

"""What stands behind the pool's doors: its models, and one call from its tensors to its answer.

OIP gRPC and the link stream both end here, so a request is treated alike whoever brought it: find the lane, read the
tensors, wait for a turn in a batch, write the outputs that were asked for.

A caller without a deadline gets the model's default budget, so that everything in the queue has one. Load reports
carry the epoch of this process, microseconds of its start since 1970: larger than that of the process before,
without a file.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from numpy.typing import NDArray

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.scheduling.job import PoolRequest, PoolResult
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.serving.coalescing import Coalescer, Submit
from cloud_pool.serving.sequence_state import SequenceStates
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.supervisor import PoolSupervisor
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.fleet.offers import ModelOffer, Standing, VariantOffer
from tidegate.metrics.served import ServedCounts
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import version_key
from tidegate.models.work import Work, fits, work_of
from tidegate.oip.host import ModelStatistics, TimedCount
from tidegate.oip.request_constraints import check_is_no_gateways
from tidegate.oip.sequence import sequence_of
from tidegate.outcome import ModelNotFound, NotSupported, Outcome, Unreachable
from tidegate.trace_context import Trace
from tidegate.tracing.served import ServedTraces
from tidegate.types import Call, InferRequest, InferResponse, LoadReport, Reply, Route


class PoolHost:
    """A `ModelHost` over one scheduler.

    Args:
        name: of this pool; answers say "pool/NAME".
        loadables: what is served; the first of each model is used when no variant is demanded.
        lesser: the precision that answers who demands none, while `degraded()`; "" is none.
        spare: whether it answers nobody else, at other times.
        epoch: unique to this process and larger than that of the one before.
    """

    def __init__(
        self,
        name: str,
        loadables: Iterable[PoolLoadable],
        scheduler: PoolScheduler,
        supervisor: PoolSupervisor,
        *,
        epoch: int,
        lesser: str = "",
        spare: bool = False,
        degraded: Callable[[], bool] = lambda: False,
        traces: ServedTraces | None = None,
    ) -> None:
        self._lesser = lesser
        self._spare = spare
        self._degraded = degraded
        self.epoch = epoch
        self._name = name
        self._scheduler = scheduler
        self._supervisor = supervisor
        self._coalescer = Coalescer(scheduler.submit)
        self._sequence = count(1)
        self._models: dict[tuple[str, str], list[PoolLoadable]] = {}  # by name and version
        self._meant: dict[str, str] = {}  # the version of a request that names none: the highest here
        self._draining = False
        self.memories = SequenceStates()
        self.served = ServedCounts()
        self._traces = traces or ServedTraces(self.server_name, random.getrandbits)
        for loadable in loadables:
            name, version = loadable.manifest.name, loadable.manifest.version
            self._models.setdefault((name, version), []).append(loadable)
            self._meant[name] = max(version, self._meant.get(name, version), key=version_key)

    @property
    def server_name(self) -> str:
        return f"pool/{self._name}"

    def ready(self) -> bool:
        return not self._draining and self._supervisor.state == "ready"

    def manifests(self) -> Sequence[Manifest]:
        return tuple(loadables[0].manifest for loadables in self._models.values())

    def manifest(self, name: str, version: str = "") -> Manifest:
        return self._loadables(name, version)[0].manifest

    def model_ready(self, name: str, version: str = "") -> bool:
        try:
            self._loadables(name, version)
        except ModelNotFound:
            return False
        return self.ready()

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        if name:
            return (self._statistics(self._loadables(name, version)),)
        return tuple(self._statistics(loadables) for loadables in self._models.values())

    def offers(self) -> tuple[ModelOffer, ...]:
        """What is offered now, with the costs as measured at warm-up."""
        return tuple(self._offer(loadables) for loadables in self._models.values())

    def load_report(self) -> LoadReport:
        """How busy this pool is now; each report has the next sequence number."""
        scheduler = self._scheduler
        delay_s = scheduler.queue_delay_s(clock.now())
        return LoadReport(self.epoch, next(self._sequence), scheduler.queued, scheduler.in_flight, delay_s)

    @property
    def coalesced(self) -> int:
        """Requests that were answered with another's computation."""
        return self._coalescer.spared

    def drain(self) -> None:
        """Take no more calls; those that were taken are answered."""
        self._draining = True

    async def infer(self, call: Call) -> Reply:
        """Answer a checked call.

        Raises:
            ModelNotFound: no such model or version here.
            NotSupported: no variant here is the demanded one, or takes rows of this length; or only a gateway could
                say.
            InvalidRequest, Overloaded: as `cloud_pool/core/batching/sequences.py` says of a sequence's step.
            Unreachable: there is no worker and no time to wait for one, or the pool is shutting down.
            Overloaded, DeadlineExceeded: by `cloud_pool/core/batching/batcher.py`.
            InternalError: the engine raised.
        """
        check_is_no_gateways(call, self.server_name)
        manifest = self._loadables(call.request.model_name, call.request.model_version)[0].manifest
        trace = self._traces.begin(call)
        self.served.began(manifest.name, manifest.version)
        try:
            reply = await self._answer(call, trace)
        except (Exception, asyncio.CancelledError) as error:
            self.served.ended(manifest.name, manifest.version, Outcome.of(error))
            self._traces.ended(trace, call, error)
            raise
        self.served.answered(manifest.name, manifest.version, reply)
        self._traces.answered(trace, call, reply)
        return reply

    async def _answer(self, call: Call, trace: Trace | None) -> Reply:
        if self._draining:
            raise Unreachable(f"{self.server_name} is shutting down")
        loadables = self._loadables(call.request.model_name, call.request.model_version)
        work = work_of(loadables[0].manifest, call.request)
        loadable = self._choose(loadables, work, call.variant)
        deadline = loadable.manifest.default_budget_s + call.arrived_at if call.deadline is None else call.deadline

        def run(arrays: dict[str, NDArray[Any]]) -> Awaitable[PoolResult]:
            ask = PoolRequest(
                arrays, work.units, call.arrived_at, deadline, call.priority, call.on_accepted, trace=trace
            )
            return self._counted(loadable.key, ask)

        arrays = {tensor.name: tensor_to_array(tensor) for tensor in call.request.inputs}
        answer = await self.memories.remembering(loadable.manifest, call.request.parameters, arrays, run)
        degraded = not call.variant and loadable is not loadables[0] and loadable.variant.precision == self._lesser
        return self._reply(loadable, call.request, answer, deadline, degraded=degraded)

    async def _counted(self, key: str, ask: PoolRequest) -> PoolResult:
        """The scheduler's answer, or its error, in the statistics. A caller who leaves is neither."""
        began_at = clock.now()
        lane = self._supervisor.lanes.get(key)
        try:
            answer = await self._submit(lane)(key, ask)
        except Exception:
            if lane is not None:
                lane.statistics.fail.add(clock.now() - began_at)
            raise
        if lane is not None:
            lane.statistics.success.add(clock.now() - began_at)
            lane.statistics.queue.add(answer.queue_s)
            lane.statistics.compute_infer.add(answer.compute_s)
        return answer

    def _submit(self, lane: ModelInstance | None) -> Submit:
        coalesce = lane is not None and lane.manifest.batching.coalesce
        return self._coalescer.submit if coalesce else self._scheduler.submit

    def _reply(
        self, loadable: PoolLoadable, request: InferRequest, answer: PoolResult, deadline: float, *, degraded: bool
    ) -> Reply:
        variant = loadable.variant.name
        return Reply(
            response=_response(loadable.manifest, request, answer.outputs),
            stages={"queue": answer.queue_s, "compute": answer.compute_s},
            route=Route(self.server_name, "only", variant, degraded=degraded),
            budget_left_s=deadline - clock.now(),
            batch_size=answer.batch_rows,
            variant=variant,
            load=self.load_report(),
            batch_wait_s=answer.batch_wait_s,
        )

    def _choose(self, loadables: Sequence[PoolLoadable], work: Work, demanded: str) -> PoolLoadable:
        wanted = [one for one in loadables if demanded in ("", one.variant.name, one.variant.precision)]
        if not demanded and self._degraded():
            wanted.sort(key=lambda one: one.variant.precision != self._lesser)
        name = loadables[0].manifest.name
        if not wanted:
            here = ", ".join(one.variant.name for one in loadables)
            raise NotSupported(f"{self.server_name} has no variant {demanded!r} of {name!r} (here: {here})")
        # Rows are no limit here: a request of many is run in parts.
        fitting = (one for one in wanted if fits(work, max_batch=None, max_tokens=one.variant.max_tokens))
        chosen = next(fitting, None)
        if chosen is None:
            limits = ", ".join(f"{one.variant.name} up to {one.variant.max_tokens}" for one in wanted)
            raise NotSupported(
                f"{name!r} on {self.server_name} takes no rows of {work.longest_row} (max_tokens: {limits})"
            )
        return chosen

    def _loadables(self, name: str, version: str) -> list[PoolLoadable]:
        if name not in self._meant:
            here = ", ".join(self._meant)
            raise ModelNotFound(f"there is no model {name!r} on {self.server_name} (models: {here})")
        loadables = self._models.get((name, version or self._meant[name]))
        if loadables is None:
            served = ", ".join(each for one, each in self._models if one == name)
            raise ModelNotFound(f"model {name!r} has no version {version!r} on {self.server_name} (versions: {served})")
        return loadables

    def _offer(self, loadables: Sequence[PoolLoadable]) -> ModelOffer:
        first = loadables[0]
        variants = tuple(
            _variant_offer(one.variant, self._supervisor.lanes.get(one.key), self._standing(one, loadables))
            for one in loadables
        )
        return ModelOffer(
            first.manifest.name,
            first.manifest.version,
            variants,
            state=self._supervisor.state,
            digest=first.variant.sha256,
        )

    def _standing(self, loadable: PoolLoadable, loadables: Sequence[PoolLoadable]) -> Standing:
        """Who gets a variant now, if anybody but direct callers asks."""
        lesser = [one.variant.precision == self._lesser for one in loadables]
        if not any(lesser) or lesser[0]:  # a model with nothing lesser, or with nothing fuller
            return ""
        if loadable.variant.precision == self._lesser:
            return "relief" if self._degraded() else "spare" if self._spare else ""
        return "relieved" if self._degraded() else ""

    def _statistics(self, loadables: Sequence[PoolLoadable]) -> ModelStatistics:
        lanes = [self._supervisor.lanes[one.key] for one in loadables if one.key in self._supervisor.lanes]
        manifest = loadables[0].manifest
        return _merged(ModelStatistics(manifest.name, manifest.version), [lane.statistics for lane in lanes])

    def __repr__(self) -> str:
        models = ", ".join(":".join(key) for key in self._models)
        return f"<PoolHost {self._name} {self._supervisor.state} {models} {self._scheduler!r}>"


def _variant_offer(variant: Variant, lane: ModelInstance | None, standing: Standing) -> VariantOffer:
    return VariantOffer(
        variant.name,
        variant.precision,
        cost=lane.cost if lane is not None else (),
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


def _response(manifest: Manifest, request: InferRequest, outputs: Mapping[str, NDArray[Any]]) -> InferResponse:
    """The outputs that were asked for, or all but what a sequence keeps, in the manifest's order."""
    kept = manifest.sequence
    wanted = {output.name for output in request.outputs}
    if not wanted and kept is not None and sequence_of(request.parameters):
        wanted = {spec.name for spec in manifest.outputs} - set(kept.state_inputs.values())
    tensors = tuple(
        array_to_tensor(spec.name, outputs[spec.name], spec.datatype)
        for spec in manifest.outputs
        if not wanted or spec.name in wanted
    )
    return InferResponse(manifest.name, manifest.version, tensors, id=request.id)

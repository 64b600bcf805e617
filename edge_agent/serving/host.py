"""What stands behind every door of an edge: the models it runs, and one call from its tensors to its answer.

The gRPC server, the HTTP server and the link stream all end here, so a request is treated alike whoever brought it. A
call goes straight down: find the model, choose the variant, read the tensors, wait for a turn, compute, write the
answer.

A variant's limits are the edge's word on what it takes: work beyond them is refused as NotSupported with the limit's
name, never tried. Among the variants that take the work the cheapest on this device is used, unless the caller
demands one.

A caller without a deadline gets the model's default, so that everything in the queue has one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from msgspec.structs import replace
from numpy.typing import NDArray

from edge_agent.serving.runner import Runner
from edge_agent.serving.scheduler import EdgeScheduler, WorkResult
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.fleet.offers import ModelOffer
from tidegate.metrics.served import ServedCounts
from tidegate.models.manifest import Manifest, TensorSpec, Variant
from tidegate.models.work import Work, fits, work_of
from tidegate.oip.host import ModelStatistics, TimedCount
from tidegate.oip.request_constraints import check_is_no_gateways
from tidegate.outcome import InternalError, ModelNotFound, NotSupported, Outcome, Overloaded, PeerError, Unreachable
from tidegate.tracing.served import ServedTraces
from tidegate.types import Call, InferRequest, InferResponse, LoadReport, Reply, Route, Tensor
from tidegate.workers.process import ComputeResult

EXHAUSTED_FOR_S = 30.0  # a battery does not fill faster


@dataclass(slots=True)
class _Model:
    runner: Runner
    soaking: bool = False
    statistics: ModelStatistics = field(init=False)
    inside: int = 0  # calls
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        manifest = self.runner.manifest
        self.statistics = ModelStatistics(manifest.name, manifest.version)
        self.idle.set()

    def offer(self) -> ModelOffer:
        offer = self.runner.offer()
        return replace(offer, state="soaking") if self.soaking and offer.state == "ready" else offer

    def enter(self) -> None:
        self.inside += 1
        self.idle.clear()

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside:
            self.idle.set()


class EdgeHost:
    """A `ModelHost` over one runner per model.

    Args:
        name: of this edge in its fleet; answers say "edge/NAME".
        epoch: the number of this agent's session, the same that its MQTT messages carry.
        exhausted: why the device takes no new work just now, "" while it does; asked for every call.
        on_answered: told after each call which runner computed it in so many seconds; or failed to by its own fault,
            not by the caller's or the crowd's (None).
    """

    def __init__(
        self,
        name: str,
        runners: Sequence[Runner],
        scheduler: EdgeScheduler,
        *,
        epoch: Callable[[], int],
        exhausted: Callable[[], str] = lambda: "",
        on_answered: Callable[[Runner, float | None], None] = lambda runner, compute_s: None,
        traces: ServedTraces | None = None,
    ) -> None:
        self._name = name
        self._models = {runner.manifest.name: _Model(runner) for runner in runners}
        self._scheduler = scheduler
        self._epoch = epoch
        self._exhausted = exhausted
        self._on_answered = on_answered
        self._leaving: list[_Model] = []  # routed no more, with calls inside
        self._sequence = count(1)
        self._offers = tuple(model.offer() for model in self._models.values())
        self._draining = False
        self.served = ServedCounts()
        self._traces = traces or ServedTraces(self.server_name, random.getrandbits)

    @property
    def server_name(self) -> str:
        return f"edge/{self._name}"

    @property
    def draining(self) -> bool:
        return self._draining

    def ready(self) -> bool:
        return not self._draining and all(model.runner.state == "ready" for model in self._models.values())

    def manifests(self) -> Sequence[Manifest]:
        return tuple(model.runner.manifest for model in self._models.values())

    def manifest(self, name: str, version: str = "") -> Manifest:
        return self._model(name, version).runner.manifest

    def model_ready(self, name: str, version: str = "") -> bool:
        try:
            return not self._draining and self._model(name, version).runner.state == "ready"
        except ModelNotFound:
            return False

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        if name:
            return (self._model(name, version).statistics,)
        return tuple(model.statistics for model in self._models.values())

    def offers(self) -> tuple[ModelOffer, ...]:
        """What is offered now; the same object until `refresh`."""
        return self._offers

    def load_report(self) -> LoadReport:
        """How busy this edge is now; each report has the next sequence number."""
        scheduler = self._scheduler
        delay_s = scheduler.queue_delay_s()
        return LoadReport(self._epoch(), next(self._sequence), scheduler.queued, scheduler.in_flight, delay_s)

    @property
    def busy(self) -> bool:
        """Whether anything waits or is computed."""
        return self._scheduler.queued + self._scheduler.in_flight > 0

    def refresh(self, runner: Runner) -> None:
        """A runner's state changed: what waits for a lost worker is refused, and the offers are made anew."""
        if runner.state != "ready":
            self._scheduler.close(runner.name, runner.unready())
        self._offers = tuple(model.offer() for model in self._models.values())

    def routed(self, name: str) -> Runner | None:
        """Who answers for a model now."""
        model = self._models.get(name)
        return model.runner if model is not None else None

    def route(self, runner: Runner, *, soaking: bool = False) -> None:
        """From the next call on this runner answers for its model; calls that are inside the one before end there."""
        name = runner.manifest.name
        before = self._models.get(name)
        if before is not None and before.runner is runner:
            before.soaking = soaking
        else:
            self._put_aside(before)
            self._models[name] = _Model(runner, soaking)
        self._offers = tuple(model.offer() for model in self._models.values())

    def unroute(self, name: str) -> None:
        """Nobody answers for a model any more."""
        self._put_aside(self._models.pop(name, None))
        self._offers = tuple(model.offer() for model in self._models.values())

    async def emptied(self, runner: Runner) -> None:
        """Return once no call is inside a runner that is not routed any more."""
        for model in [one for one in self._leaving if one.runner is runner]:
            await model.idle.wait()
            self._leaving.remove(model)

    def _put_aside(self, model: _Model | None) -> None:
        self._leaving = [one for one in self._leaving if one.inside]
        if model is not None and model.inside:
            self._leaving.append(model)

    def drain(self) -> None:
        """Take no more calls; those that were taken are answered."""
        self._draining = True

    async def infer(self, call: Call) -> Reply:
        """Answer a checked call.

        Raises:
            ModelNotFound: no such model or version here.
            NotSupported: no variant here takes this work, or not the demanded one; or only a gateway could say.
            Unreachable: the model has no worker now, or lost it during this call, or the edge is shutting down.
            Overloaded: the device spares its battery; or by `edge_agent/core/edge_queue.py`.
            DeadlineExceeded: by `edge_agent/core/edge_queue.py`.
            InternalError: the engine raised.
        """
        check_is_no_gateways(call, self.server_name)
        began_at = clock.now()
        model = self._model(call.request.model_name, call.request.model_version)
        manifest = model.runner.manifest
        trace = self._traces.begin(call)
        self.served.began(manifest.name, manifest.version)
        model.enter()
        try:
            reply = await self._answer(model, call)
        except (Exception, asyncio.CancelledError) as error:
            self.served.ended(manifest.name, manifest.version, Outcome.of(error))
            self._traces.ended(trace, call, error)
            if isinstance(error, Exception):
                model.statistics.fail.add(clock.now() - began_at)
            if isinstance(error, InternalError | PeerError):
                self._on_answered(model.runner, None)
            raise
        finally:
            model.leave()
        model.statistics.success.add(clock.now() - began_at)
        self.served.answered(manifest.name, manifest.version, reply)
        self._traces.answered(trace, call, reply)
        return reply

    async def _answer(self, model: _Model, call: Call) -> Reply:
        runner, request = model.runner, call.request
        work = work_of(runner.manifest, request)
        if self._draining:
            raise Unreachable(f"{self.server_name} is shutting down")
        if why := self._exhausted():  # also whoever has not heard of it yet is told, and may go elsewhere at once
            raise Overloaded(f"{self.server_name} takes no new work: {why}", retry_after_s=EXHAUSTED_FOR_S)
        variant = self._choose(runner, work, call.variant)
        if runner.state != "ready":
            raise Unreachable(runner.unready())
        deadline = call.arrived_at + runner.manifest.default_budget_s if call.deadline is None else call.deadline
        done = await self._compute(runner, variant, work, call, deadline)
        _count(model.statistics, work, done)
        self._on_answered(runner, done.compute_s)
        return Reply(
            response=_response(runner.manifest, request, done.result.outputs),
            stages={"queue": done.queue_s, "compute": done.compute_s},
            route=Route(self.server_name, "only", variant.name),
            budget_left_s=deadline - clock.now(),
            batch_size=work.rows,
            variant=variant.name,
            load=self.load_report(),
        )

    async def _compute(
        self, runner: Runner, variant: Variant, work: Work, call: Call, deadline: float
    ) -> WorkResult[ComputeResult]:
        inputs = {tensor.name: tensor_to_array(tensor) for tensor in call.request.inputs}
        time = runner.service_time(variant.name)
        time.relax(clock.now())

        async def compute() -> ComputeResult:
            began_at = clock.now()
            computed = await runner.infer(variant.name, inputs)
            # Here and not after the wait: a call whose caller left has cost what it cost.
            time.record(work.units, clock.now() - began_at)
            return computed

        return await self._scheduler.run(
            compute,
            lane=runner.name,
            deadline=deadline,
            cost_s=time.predict_s(work.units),
            priority=call.priority,
            on_accepted=call.on_accepted,
        )

    def _choose(self, runner: Runner, work: Work, demanded: str) -> Variant:
        variants = [variant for variant in runner.variants if demanded in ("", variant.name)]
        if not variants:
            here = ", ".join(variant.name for variant in runner.variants)
            raise NotSupported(f"{self.server_name} has no variant {demanded!r} of {runner.name!r} (here: {here})")
        fitting = [v for v in variants if fits(work, max_batch=v.max_batch, max_tokens=v.max_tokens)]
        if not fitting:
            raise NotSupported(f"too much work for {runner.name!r} on {self.server_name}: {_excess(work, variants)}")
        return fitting[0] if len(fitting) == 1 else min(fitting, key=lambda v: _seconds(runner, v, work))

    def _model(self, name: str, version: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            here = ", ".join(self._models)
            raise ModelNotFound(f"there is no model {name!r} on {self.server_name} (models: {here})")
        if version not in ("", model.runner.manifest.version):
            here = model.runner.manifest.version
            raise ModelNotFound(f"model {name!r} has no version {version!r} on {self.server_name} (versions: {here})")
        return model

    def __repr__(self) -> str:
        states = ", ".join(f"{model.runner.name} {model.runner.state}" for model in self._models.values())
        return f"<EdgeHost {self._name} {states} {self._scheduler!r}>"


def _seconds(runner: Runner, variant: Variant, work: Work) -> float:
    return runner.service_time(variant.name).predict_s(work.units)


def _excess(work: Work, variants: Sequence[Variant]) -> str:
    """Which limits the work is over, for the caller to read."""
    words = []
    for v in variants:
        if v.max_batch is not None and work.rows > v.max_batch:
            words.append(f"{work.rows} rows, but {v.name} takes at most {v.max_batch} (max_batch)")
        if v.max_tokens is not None and work.longest_row > v.max_tokens:
            words.append(f"rows of {work.longest_row}, but {v.name} takes at most {v.max_tokens} (max_tokens)")
    return "; ".join(words)


def _count(statistics: ModelStatistics, work: Work, done: WorkResult[ComputeResult]) -> None:
    statistics.last_inference_ms = int(clock.utc_s() * 1e3)
    statistics.inference_count += work.rows
    statistics.execution_count += 1
    statistics.queue.add(done.queue_s)
    statistics.compute_infer.add(done.compute_s)
    statistics.batches.setdefault(work.rows, TimedCount()).add(done.compute_s)


def _response(manifest: Manifest, request: InferRequest, outputs: Mapping[str, NDArray[Any]]) -> InferResponse:
    """The outputs that were asked for, or all, in the manifest's order."""
    wanted = {output.name for output in request.outputs}
    tensors = tuple(_tensor(spec, outputs) for spec in manifest.outputs if not wanted or spec.name in wanted)
    return InferResponse(manifest.name, manifest.version, tensors, id=request.id)


def _tensor(spec: TensorSpec, outputs: Mapping[str, NDArray[Any]]) -> Tensor:
    array = outputs.get(spec.name)
    if array is None:
        raise InternalError(f"the artefact gave no output {spec.name!r} (it gave {', '.join(outputs) or 'none'})")
    return array_to_tensor(spec.name, array, spec.datatype)

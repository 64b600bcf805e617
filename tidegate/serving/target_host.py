"""The host of a target: one pipeline from a checked call to its reply, the same on an edge and in a pool.

    find the model → open its trace → count it → draining? → open for work? → choose the variant → deadline
      → read the tensors → compute → write the outputs → count how it ended

OIP over gRPC, OIP over HTTP and the link stream all end here, so a request is treated alike however it arrived.

A caller may demand a version, a variant by its name or by its precision, and a least quality, as may the model's
manifest (`docs/headers.md`); for what a gateway passes on, the gateway has kept them. A caller without a deadline gets
the model's default budget, so that everything in a queue has a deadline. Each load report has the next sequence number
of the epoch, whichever way it is sent.

What differs is injected: the models (`target_model.py`), the queue whose load is reported, and what closes the target.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

from msgspec.structs import replace
from numpy.typing import NDArray

from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.fleet.offers import ModelOffer
from tidegate.metrics.served import ServedCounts
from tidegate.models.manifest import Manifest, TensorSpec, Variant
from tidegate.models.work import work_of
from tidegate.oip.call import came_by_gateway
from tidegate.oip.check import check
from tidegate.oip.host import ModelStatistics
from tidegate.oip.request_constraints import check_is_no_gateways, version_of
from tidegate.outcome import InternalError, InvalidRequest, ModelNotFound, NotSupported, Outcome, Unreachable
from tidegate.serving.joint_queue import TargetQueue
from tidegate.serving.model_table import ModelTable
from tidegate.serving.target_model import Computation, Computed, TargetModel
from tidegate.trace_context import Trace
from tidegate.tracing.served import ServedTraces
from tidegate.types import Call, InferRequest, InferResponse, LoadReport, Reply, Route, Tensor

M = TypeVar("M", bound=TargetModel)


class TargetHost(Generic[M]):
    """A `ModelHost` over the models of one target.

    Args:
        server_name: "edge/NAME" or "pool/NAME", as answers say it.
        models: what is served; the table may change between calls.
        queue: the queue whose load is reported.
        epoch: the number of this process's session, larger than that of the session before.
        check_open: raises a ServeError while the target takes no new work.
        on_missed: called with the arrival and the end of each call that ended past its deadline.
    """

    def __init__(
        self,
        server_name: str,
        models: ModelTable[M],
        queue: TargetQueue,
        *,
        epoch: Callable[[], int],
        check_open: Callable[[], None] = lambda: None,
        traces: ServedTraces | None = None,
        on_missed: Callable[[float, float], None] = lambda _arrived_at, _ended_at: None,
    ) -> None:
        self.served = ServedCounts()
        self.models = models
        self._server_name = server_name
        self._queue = queue
        self._epoch = epoch
        self._check_open = check_open
        self._traces = traces or ServedTraces(server_name, random.getrandbits)
        self._on_missed = on_missed
        self._sequence = count(1)
        self._draining = False

    @property
    def server_name(self) -> str:
        return self._server_name

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Take no more calls; calls that were taken are answered."""
        self._draining = True

    def ready(self) -> bool:
        return not self._draining and all(model.ready for model in self.models)

    def manifests(self) -> Sequence[Manifest]:
        return tuple(model.manifest for model in self.models)

    def manifest(self, name: str, version: str = "") -> Manifest:
        return self.models.find(name, version).manifest

    def model_ready(self, name: str, version: str = "") -> bool:
        try:
            return not self._draining and self.models.find(name, version).ready
        except ModelNotFound:
            return False

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        if name:
            return (self.models.find(name, version).statistics(),)
        return tuple(model.statistics() for model in self.models)

    def offers(self) -> tuple[ModelOffer, ...]:
        """What is offered now, with the costs as measured at warm-up."""
        return tuple(model.offer() for model in self.models)

    def load_report(self) -> LoadReport:
        """How busy the target is now."""
        queue = self._queue
        return LoadReport(
            self._epoch(), next(self._sequence), queue.queued, queue.in_flight, queue.queue_delay_s(clock.now())
        )

    async def infer(self, call: Call) -> Reply:
        """Answer a checked call.

        Raises:
            ModelNotFound: the target has no such model or version.
            NotSupported: no variant takes this work, is the demanded one or has the demanded quality; or the demand is
                one for a gateway.
            Unreachable: the model has no worker, or lost it during this call, or the target is shutting down.
            ServeError: as `check_open`, `TargetModel.choose` and `TargetModel.compute` say.
            InvalidRequest: the demanded version takes no such request; or bytes are no text, which its engine reads.
            InternalError: the engine raised, or did not give what the manifest promises.
        """
        check_is_no_gateways(call, self._server_name)
        if call.headers or call.request.parameters:
            call = self._of_demanded_version(call)
        began_at = clock.now()
        model = self.models.find(call.request.model_name, call.request.model_version)
        manifest = model.manifest
        trace = self._traces.begin(call)
        self.served.began(manifest.name, manifest.version)
        try:
            reply = await self._answer(model, call, trace)
        except (Exception, asyncio.CancelledError) as error:
            self.served.ended(manifest.name, manifest.version, Outcome.of(error))
            self._traces.ended(trace, call, error)
            model.ended(clock.now() - began_at, error)
            self._check_in_time(manifest, call)
            raise
        model.ended(clock.now() - began_at, None)
        self._check_in_time(manifest, call)
        self.served.answered(manifest.name, manifest.version, reply)
        self._traces.answered(trace, call, reply)
        return reply

    def _of_demanded_version(self, call: Call) -> Call:
        """The call for the version that its header or parameter demands. A gateway's names the version already."""
        request = call.request
        demanded = "" if request.model_version else version_of(call.headers, request.parameters)
        if not demanded:
            return call
        manifest = self.models.find(request.model_name, demanded).manifest
        request = request.pinned(demanded)
        check(request, manifest)  # until now it was held against the version that answers without a demand
        return replace(call, request=request)

    def _check_in_time(self, manifest: Manifest, call: Call) -> None:
        now = clock.now()
        if now >= _deadline(manifest, call):
            self._on_missed(call.arrived_at, now)

    async def _answer(self, model: M, call: Call, trace: Trace | None) -> Reply:
        if self._draining:
            raise Unreachable(f"{self._server_name} is shutting down")
        self._check_open()
        manifest, request = model.manifest, call.request
        work = work_of(manifest, request)
        variant = model.choose(self._demanded(model, call), work, call.variant)
        deadline = _deadline(manifest, call)
        arrays = {tensor.name: tensor_to_array(tensor) for tensor in request.inputs}
        if variant.reads_texts and manifest.pipeline is None:
            _check_texts(arrays)
        computed = await model.compute(Computation(call, arrays, variant, work, deadline, trace))
        return Reply(
            response=_response(manifest, request, computed),
            stages={"queue": computed.queue_s, "compute": computed.compute_s},
            route=Route(self._server_name, "only", variant.name, degraded=computed.degraded),
            budget_left_s=deadline - clock.now(),
            batch_size=computed.batch_rows,
            variant=variant.name,
            load=self.load_report(),
            batch_wait_s=computed.batch_wait_s,
        )

    def _demanded(self, model: M, call: Call) -> Sequence[Variant]:
        """The variants that may answer, by the demands of caller and manifest. Raises NotSupported: there is none."""
        variants = self._named(model, call.variant)
        floor = max(call.min_quality, model.manifest.min_quality)
        if not floor or came_by_gateway(call):  # which has chosen by what it knows of all variants
            return variants
        good = [one for one in variants if one.quality is not None and one.quality.value >= floor]
        if not good:
            here = ", ".join(f"{one.name} {one.quality.value:g}" if one.quality else one.name for one in variants)
            raise NotSupported(
                f"{self._server_name} has no variant of {model.label!r} of quality {floor:g} or better (here: {here})"
            )
        return good

    def _named(self, model: M, demanded: str) -> Sequence[Variant]:
        """The variant of this name, or else the variants of this precision; all when nothing is demanded.

        The name comes first because a gateway demands by name the very variant that it has chosen.
        """
        if not demanded:
            return model.variants
        by_name = [one for one in model.variants if one.name == demanded]
        if by_name:
            return by_name
        by_precision = [one for one in model.variants if one.precision == demanded]
        if by_precision:
            return by_precision
        here = ", ".join(one.name for one in model.variants)
        raise NotSupported(f"{self._server_name} has no variant {demanded!r} of {model.label!r} (here: {here})")


def _deadline(manifest: Manifest, call: Call) -> float:
    return call.arrived_at + manifest.default_budget_s if call.deadline is None else call.deadline


def _check_texts(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raises InvalidRequest where an element of BYTES is no text: the engine would fail, as by a poisonous request."""
    for name, array in arrays.items():
        if not array.dtype.hasobject:
            continue
        for index, item in enumerate(array.reshape(-1)):
            try:
                item.decode()
            except UnicodeDecodeError as error:
                raise InvalidRequest(
                    f"input {name!r}: element {index} of its data is no UTF-8 text, and this model reads nothing else"
                ) from error


def _response(manifest: Manifest, request: InferRequest, computed: Computed) -> InferResponse:
    """The outputs that the request names, or all but the withheld ones, in the manifest's order."""
    named = {output.name for output in request.outputs}
    tensors = tuple(
        _tensor(spec, computed.outputs)
        for spec in manifest.outputs
        if (spec.name in named if named else spec.name not in computed.withheld)
    )
    return InferResponse(manifest.name, manifest.version, tensors, id=request.id, parameters=computed.parameters)


def _tensor(spec: TensorSpec, outputs: Mapping[str, NDArray[Any]]) -> Tensor:
    array = outputs.get(spec.name)
    if array is None:
        raise InternalError(f"the artefact gave no output {spec.name!r} (it gave {', '.join(outputs) or 'none'})")
    return array_to_tensor(spec.name, array, spec.datatype)

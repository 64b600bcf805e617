"""A call as placement sees it: how much work it is, what it demands, and how much it is worth (`Ask`).

The manifest says how a request's tensors count as work; the caller's wishes and the manifest's own limits are both
kept, and the stricter one holds. Tensors themselves go no further than this: placement knows their size only.

The same in words, for the access log (`WorkDescription`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gateway.core.estimate.service_cost import CostClass, cost_class, unloaded_p95_s
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import variant_misfit
from gateway.core.request.attempt import ComputedWork
from tidegate.generate.request import SCHEMA_KEY
from tidegate.generate.usage import usage_if_generated
from tidegate.models.manifest import Feature, Manifest
from tidegate.models.share_weights import ShareWeights
from tidegate.models.work import answer_bytes, generated_units, work_of
from tidegate.placement_pin import stricter
from tidegate.types import Call, InferRequest, InferResponse, Tensor

ManifestOf = Callable[[str, str], Manifest]


class WorkDescription(NamedTuple):
    """A call's work in words, for the access log."""

    feature: Feature
    units: float
    cost_class: CostClass
    budget_s: float


class AskBuilder:
    """Reads calls by their models' manifests.

    Args:
        weight_of: how much more than others' an answer to this tenant is worth.
        shares: how much more than others' an answer of a model is worth.
    """

    def __init__(
        self,
        manifest_of: ManifestOf,
        fleet: Fleet,
        weight_of: Callable[[str], float] = lambda _tenant: 1.0,
        shares: ShareWeights | None = None,
    ) -> None:
        self._manifest_of = manifest_of
        self._fleet = fleet
        self._weight_of = weight_of
        self._shares = shares or ShareWeights()

    def ask(self, call: Call) -> Ask:
        """The call as placement sees it."""
        request = call.request
        manifest = self._manifest_of(request.model_name, request.model_version)
        work = work_of(manifest, request)
        assert call.deadline is not None, "the expire layer sets a deadline"
        return Ask(
            model=manifest.name,
            version=manifest.version,
            units=work.units,
            rows=work.rows,
            longest_row=work.longest_row,
            deadline=call.deadline,
            variant=call.variant,
            priority=call.priority,
            body_bytes=tensor_bytes(request.inputs),
            answer_bytes=answer_bytes(manifest, request) if self._fleet.is_metered else 0,
            min_quality=max(call.min_quality, manifest.min_quality),
            pin=stricter(call.pin, manifest.pin),
            weight=self._weight_of(call.tenant) * self._shares.of(manifest),
            tenant=call.tenant,
            escalates=manifest.confidence is not None
            and not call.variant
            and stricter(call.pin, manifest.pin) == "any",
            attested=call.attested or manifest.require == "attested",
            schema=SCHEMA_KEY in request.parameters and manifest.generative is not None,
        )

    def computed(self, request: InferRequest, response: InferResponse) -> ComputedWork | None:
        """What a generation turned out to be; None of other answers, and of one that does not say."""
        usage = usage_if_generated(response)
        if usage is None:
            return None
        manifest = self._manifest_of(request.model_name, request.model_version)
        if manifest.generative is None:
            return None
        units = generated_units(manifest, usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens)
        return ComputedWork(max(0.0, units), usage.prefill_s + usage.decode_s)

    def describe(self, call: Call) -> WorkDescription:
        """What the call costs, in words. Computed on demand: only an access log wants it."""
        manifest = self._manifest_of(call.request.model_name, call.request.model_version)
        budget_s = manifest.default_budget_s if call.deadline is None else call.deadline - call.arrived_at
        ask = self.ask(call.due(call.arrived_at + budget_s))
        edges = [
            unloaded_p95_s(offered.cost, ask.units, offered.target.link.rtt_s)
            for offered in self._fleet.offered(ask.model, ask.version)
            if offered.target.spec.tier == "edge" and not variant_misfit(offered.variant, ask)
        ]
        return WorkDescription(manifest.cost.feature, ask.units, cost_class(edges, budget_s), budget_s)

    def __repr__(self) -> str:
        return f"<AskBuilder about {self._fleet!r}>"


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' contents: what a body's time on the wire goes by."""
    size = 0
    for tensor in tensors:
        size += len(tensor.raw)
    return size

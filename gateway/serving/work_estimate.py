"""A call as placement sees it: how much work it is, what it demands, and how much it is worth (`Ask`).

The manifest says how a request's tensors count as work, and earlier answers how long a generation will be. The caller's
wishes and the manifest's own limits are both kept, and the stricter one holds. Tensors themselves go no further than
this: placement knows their size only.

The same in words, for the access log (`WorkDescription`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gateway.core.access.entitlement import second_payer
from gateway.core.admission.token_forecast import TokenForecast
from gateway.core.estimate.known_prefixes import prefix_chain
from gateway.core.estimate.output_length import LengthForecast, OutputLengths, certain_length
from gateway.core.estimate.service_cost import CostClass, cost_class, unloaded_p95_s
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import variant_misfit
from gateway.core.placement.generation_time import GenerationAsk
from gateway.core.request.attempt import ComputedTokens, ComputedWork
from gateway.core.request.resumption import ResumptionTerms
from gateway.serving.continued_generation import resumption_terms
from tidegate.generate.request import ANSWERED_KEY, IGNORE_STOP_KEY, MAX_TOKENS_KEY, SCHEMA_KEY, STOP_TOKENS_KEY
from tidegate.generate.usage import usage_if_generated
from tidegate.models.generative import Generative
from tidegate.models.manifest import Feature, Manifest
from tidegate.models.share_weights import ShareWeights
from tidegate.models.work import answer_bytes, generated_units, generation_tokens, prompt_ids, work_of
from tidegate.outcome import ModelNotFound
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
        self.lengths = OutputLengths()

    def ask(self, call: Call) -> Ask:
        """The call as placement sees it."""
        request = call.request
        manifest = self._manifest_of(request.model_name, request.model_version)
        work = work_of(manifest, request)
        assert call.deadline is not None, "the expire layer sets a deadline"
        units, generation = work.units, None
        if manifest.generative is not None:
            generation = self._generation(call, manifest, manifest.generative)
            units = max(1.0, generation.prompt_units - 1.0 + generation.mean_length)
        return Ask(
            model=manifest.name,
            version=manifest.version,
            units=units,
            rows=work.rows,
            longest_row=work.longest_row,
            deadline=call.deadline,
            variant=call.variant,
            priority=call.priority,
            body_bytes=tensor_bytes(request.inputs),
            answer_bytes=answer_bytes(manifest, request, generation.mean_length if generation else 0.0)
            if self._fleet.is_metered
            else 0,
            min_quality=max(call.min_quality, manifest.min_quality),
            pin=stricter(call.pin, manifest.pin),
            weight=self._weight_of(call.tenant) * self._shares.of(manifest),
            tenant=call.tenant,
            also_pays=second_payer(call),
            escalates=_judges_itself(manifest) and not call.variant and stricter(call.pin, manifest.pin) == "any",
            attested=call.attested or manifest.require == "attested",
            schema=SCHEMA_KEY in request.parameters and manifest.generative is not None,
            generation=generation,
            ids=manifest.generative is not None and not _is_in_words(request),
            begun=request.text is not None and bool(request.text.begun),
        )

    def resumption_terms(self, call: Call) -> ResumptionTerms | None:
        """How the call's answer may be gone on with elsewhere; None where it is no generation."""
        request = call.request
        if call.tokens is None and MAX_TOKENS_KEY not in request.parameters:
            return None  # most calls: every front says how many tokens it wants
        return resumption_terms(call, self._manifest_of(request.model_name, request.model_version))

    def _generation(self, call: Call, manifest: Manifest, generative: Generative) -> GenerationAsk:
        request = call.request
        prompt, most = generation_tokens(generative, request)
        is_certain = _is_certain(request, generative)
        forecast = self._forecast(call, manifest, generative, most)
        # Whoever takes the answer in one piece sees no first token.
        is_streamed = call.tokens is not None
        return GenerationAsk(
            prompt_units=generated_units(manifest, prompt, 1),
            certain_units=generated_units(manifest, prompt, most if is_certain else 1),
            most_units=generated_units(manifest, prompt, most),
            lengths=forecast.lengths,
            mean_length=forecast.mean,
            max_tokens=most,
            first_by=None if call.ttft_s is None or not is_streamed else call.arrived_at + call.ttft_s,
            next_s=call.tpot_s if is_streamed else None,
            token_units=generated_units(manifest, 1, 0),
            prefix=() if (ids := prompt_ids(request)) is None else prefix_chain(bytes(ids), call.tenant),
            prompt_tokens=prompt,
        )

    def _forecast(self, call: Call, manifest: Manifest, generative: Generative, most: int) -> LengthForecast:
        if _is_certain(call.request, generative):
            return certain_length(most)
        return self.lengths.forecast(manifest.name, call.tenant, most)

    def token_forecast(self, call: Call) -> TokenForecast | None:
        """The tokens of a generation, as far as they are known beforehand; None of anything else."""
        request = call.request
        manifest = self._manifest_of(request.model_name, request.model_version)
        generative = manifest.generative
        if generative is None:
            return None
        prompt, most = generation_tokens(generative, request)
        most = max(0, min(most, generative.context - prompt))  # a request that was not checked may ask for more
        expected = self._forecast(call, manifest, generative, max(1, most)).mean
        return TokenForecast(min(prompt, generative.context), min(expected, most), most)

    def learn_length(self, ask: Ask, tokens: int, *, ended: bool) -> None:
        """Take in how long an answer was, as far as it came. Args: ended: False where it was cut."""
        generation = ask.generation
        if generation is not None and len(generation.lengths) > 1:  # else its length was no accident
            self.lengths.record(ask.model, ask.tenant, generation.max_tokens, tokens, ended=ended)

    def computed(self, request: InferRequest, response: InferResponse) -> ComputedWork | None:
        """What a generation turned out to be; None of other answers, and of one that does not say."""
        usage = usage_if_generated(response)
        if usage is None:
            return None
        try:
            manifest = self._manifest_of(request.model_name, request.model_version)
        except ModelNotFound:  # its version was unloaded meanwhile
            return None
        if manifest.generative is None:
            return None
        computed = usage.prompt_tokens - usage.cached_tokens
        units = generated_units(manifest, computed, usage.completion_tokens)
        prompt_units = max(0.0, generated_units(manifest, computed, 1))
        return ComputedWork(
            max(0.0, units),
            usage.prefill_s + usage.decode_s,
            ComputedTokens(usage.completion_tokens, prompt_units, usage.prefill_s, usage.decode_s, usage.cached_tokens),
        )

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


def _judges_itself(manifest: Manifest) -> bool:
    generative = manifest.generative
    return manifest.confidence is not None or (generative is not None and generative.commit_window is not None)


def _is_in_words(request: InferRequest) -> bool:
    """Whether a target that takes text can answer the same: it has the words, also of the answer that has begun."""
    return request.text is not None and (ANSWERED_KEY not in request.parameters or bool(request.text.begun))


def _is_certain(request: InferRequest, generative: Generative) -> bool:
    """Whether nothing but its `max_tokens` ends the answer."""
    said = request.parameters
    return said.get(IGNORE_STOP_KEY) is True or not (
        generative.stop_tokens or generative.is_text_only or STOP_TOKENS_KEY in said
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' contents: what a body's time on the wire goes by."""
    size = 0
    for tensor in tensors:
        size += len(tensor.raw)
    return size

"""A generation that another target goes on with: what it is asked, and one answer of all its parts.

The target is given the prompt with the tokens that the caller has, as one prompt, and asked for the tokens that are
left. `answered_tokens` says how many at its end are of the answer, since the place of a token is part of its chance.

To the caller it is one answer: the prompt is the caller's own, and the tokens are all parts' together. What was
computed again is no part of it.

Pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from gateway.core.request.answer_so_far import AnswerSoFar
from gateway.core.request.resumption import ResumptionTerms
from tidegate.generate.request import (
    ANSWERED_KEY,
    INPUT_IDS,
    MAX_TOKENS_KEY,
    OUTPUT_IDS,
    SCHEMA_KEY,
    SEED_KEY,
    TEMPERATURE_KEY,
    ids_of,
    ids_tensor,
)
from tidegate.generate.usage import FinishReason, Usage, usage_if_generated, usage_parameters
from tidegate.models.manifest import EngineName, Manifest
from tidegate.models.work import generated_units
from tidegate.types import Call, InferRequest, InferResponse, Tensor

_ALONE: frozenset[EngineName] = frozenset({"onnxruntime-genai", "paced"})  # they compute each sequence by itself


def resumption_terms(call: Call, manifest: Manifest) -> ResumptionTerms | None:
    """None of a request that generates nothing, or that names no ids: it is not known what was asked."""
    request, generative = call.request, manifest.generative
    if generative is None:
        return None
    prompt = next((tensor for tensor in request.inputs if tensor.name == INPUT_IDS), None)
    if prompt is None:
        return None
    said = request.parameters
    asked = said.get(MAX_TOKENS_KEY)
    prompt_tokens = prompt.elements
    barred = ""
    if not call.resumes:
        barred = "its caller asked for that (tidegate-resume: never)"
    elif SCHEMA_KEY in said:
        barred = "it follows a JSON schema, and how far it had come in it was known to its target only"
    return ResumptionTerms(
        prompt_tokens=prompt_tokens,
        max_tokens=asked if isinstance(asked, int) and asked > 0 else generative.max_tokens_after(prompt_tokens),
        prompt_weight=generated_units(manifest, 1.0, 0.0),
        is_repeatable=not said.get(TEMPERATURE_KEY) or SEED_KEY in said,
        alone=frozenset(one.name for one in manifest.variants if one.engine in _ALONE),
        barred=barred,
        next_s=call.tpot_s,
    )


def continued_request(request: InferRequest, answer: AnswerSoFar, terms: ResumptionTerms) -> InferRequest:
    """The request for the rest of an answer."""
    given = len(answer)
    inputs = tuple([_lengthened(one, answer) if one.name == INPUT_IDS else one for one in request.inputs])
    own = request.parameters.get(ANSWERED_KEY, 0)  # of an answer that its caller had begun elsewhere
    answered = given + (own if isinstance(own, int) else 0)
    said = {**request.parameters, MAX_TOKENS_KEY: terms.max_tokens - given, ANSWERED_KEY: answered}
    return replace(request, inputs=inputs, parameters=said)


def joined_response(last: InferResponse, answer: AnswerSoFar, before: int, terms: ResumptionTerms) -> InferResponse:
    """All parts as one answer.

    Args:
        last: the answer of the target that spoke last.
        before: tokens that the others had given.
    """
    usage = usage_if_generated(last)
    if usage is None:
        return last
    whole = replace(
        usage,
        prompt_tokens=answer.prompt_tokens or terms.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=before + usage.completion_tokens,
    )
    outputs = [
        ids_tensor(OUTPUT_IDS, (*answer.ids[:before], *ids_of(one))) if one.name == OUTPUT_IDS else one
        for one in last.outputs
    ]
    return replace(last, outputs=tuple(outputs), parameters={**last.parameters, **usage_parameters(whole)})


def response_so_far(request: InferRequest, answer: AnswerSoFar, reason: FinishReason) -> InferResponse:
    """The answer as its caller has it, with nothing more to come."""
    usage = Usage(reason, answer.prompt_tokens, len(answer), answer.cached_tokens)
    outputs = (ids_tensor(OUTPUT_IDS, tuple(answer.ids)),)
    return InferResponse(
        request.model_name, request.model_version, outputs, id=request.id, parameters=usage_parameters(usage)
    )


def _lengthened(prompt: Tensor, answer: AnswerSoFar) -> Tensor:
    ids = answer.ids.tobytes()
    return Tensor(prompt.name, prompt.datatype, (prompt.elements + len(answer),), bytes(prompt.raw) + ids)

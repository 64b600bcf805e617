"""Checks a generation against its model's manifest, before any target spends anything on it.

Every number that a caller may give is bounded here by what the model has: ids by its vocabulary, prompt and answer by
its context. An engine that is given an id beyond its table reads memory that is not the model's, or ends its process.

Pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from tidegate.generate.request import (
    ANSWERED_KEY,
    INPUT_IDS,
    MAX_TOKENS_KEY,
    STOP_TOKENS_KEY,
    GenerateRequest,
    generate_request,
)
from tidegate.models.generative import Generative
from tidegate.outcome import InvalidRequest
from tidegate.types import InferRequest


def checked_generation(generative: Generative, request: InferRequest) -> GenerateRequest:
    """What a request asks of a model. Raises InvalidRequest, naming the key, the numbers and the way out.

    A request that does not say how many tokens it wants gets as many as the manifest says, as far as there is room.
    """
    asked = generate_request(request, default_max_tokens=generative.default_max_tokens)
    if not asked.prompt:
        raise InvalidRequest(f"input {INPUT_IDS!r} is empty: a prompt has one token at least")
    if MAX_TOKENS_KEY not in request.parameters:
        asked = replace(asked, max_tokens=generative.max_tokens_after(len(asked.prompt)))
    _check_ids(f"input {INPUT_IDS!r}", asked.prompt, generative)
    if asked.stop_tokens:
        _check_ids(f"parameter {STOP_TOKENS_KEY!r}", asked.stop_tokens, generative)
    _check_context(asked, generative)
    if asked.answered >= len(asked.prompt):
        raise InvalidRequest(
            f"parameter {ANSWERED_KEY!r} is {asked.answered}: of the {len(asked.prompt)} tokens in {INPUT_IDS!r} so "
            "many at the end are of the answer already, and at least one is the prompt's"
        )
    return asked


def _check_ids(where: str, ids: tuple[int, ...], generative: Generative) -> None:
    if min(ids) < 0 or max(ids) >= generative.vocabulary_size:
        at, bad = next((at, id) for at, id in enumerate(ids) if not 0 <= id < generative.vocabulary_size)
        raise InvalidRequest(
            f"{where} has {bad} at {at}: the model's token ids are from 0 to {generative.vocabulary_size - 1}"
        )


def _check_context(asked: GenerateRequest, generative: Generative) -> None:
    prompt, context = len(asked.prompt), generative.context
    if prompt >= context:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens, which leaves none for the answer: the model's context has {context}; "
            "shorten the prompt"
        )
    if prompt + asked.max_tokens > context:
        raise InvalidRequest(
            f"the prompt's {prompt} tokens and {MAX_TOKENS_KEY!r} {asked.max_tokens} are more than the model's context "
            f"of {context}: ask for {context - prompt} at most, or shorten the prompt"
        )

"""vLLM by token ids: its completions take a list of ids as the prompt, and give ids with `return_token_ids`.

Everything that chooses the next token is said, since what is left out comes from the model's `generation_config.json`
there. The likelihoods of tokens come by id with `return_tokens_as_token_ids`. A stop token is the last of the ids.

Source: `CompletionRequest` and `CompletionStreamResponse` of vLLM, as of 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.targets.openai.dialect import (
    MOST_TOKENS,
    Event,
    Part,
    UpstreamRequest,
    finish_in,
    first_choice,
    ids_in,
    logprob_in,
    object_in,
    text_in,
    usage_in,
)
from tidegate.generate.request import generate_request
from tidegate.token_sink import TopLogprob
from tidegate.types import InferRequest

_BY_ID: Final = "token_id:"
_MOST_DIGITS: Final = len(str(MOST_TOKENS))


class VllmDialect:
    """A `Dialect`, and the reader of its events."""

    def question(self, request: InferRequest, model: str) -> UpstreamRequest:
        asked = generate_request(request, default_max_tokens=1)
        sampling = asked.sampling
        body: dict[str, Any] = {
            "model": model,
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1e-6,  # 0 is refused there, and means the most likely token
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": asked.stop_tokens,
            "ignore_eos": asked.ignore_stop,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if asked.cache_salt:
            body["cache_salt"] = asked.cache_salt
        if asked.logprobs is not None:
            body |= {"logprobs": asked.logprobs, "return_tokens_as_token_ids": True}
        if asked.schema:
            schema = {"name": "answer", "schema": msgspec.Raw(asked.schema.encode())}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return UpstreamRequest("/completions", body)

    def reader(self, request: InferRequest) -> VllmDialect:
        return self

    def part(self, event: Event) -> Part:
        choice = first_choice(event)
        ids = ids_in(choice.get("token_ids"))
        logprobs, top = _likelihoods(object_in(choice.get("logprobs")), len(ids))
        return usage_in(event)._replace(
            ids=ids,
            text=text_in(choice.get("text")),
            logprobs=logprobs,
            top=top,
            finish=finish_in(choice.get("finish_reason")),
        )

    def __repr__(self) -> str:
        return "<VllmDialect>"


def _likelihoods(said: Mapping[str, Any], tokens: int) -> tuple[tuple[float, ...], tuple[tuple[TopLogprob, ...], ...]]:
    own = said.get("token_logprobs")
    if not isinstance(own, list) or len(own) != tokens:
        return (), ()
    top = said.get("top_logprobs")
    rows = top if isinstance(top, list) and len(top) == tokens else [{}] * tokens
    return tuple(map(logprob_in, own)), tuple([_row(object_in(row)) for row in rows])


def _row(row: Mapping[str, Any]) -> tuple[TopLogprob, ...]:
    likely = [
        TopLogprob(_id_in(name.removeprefix(_BY_ID)), logprob_in(logprob))
        for name, logprob in row.items()
        if name.startswith(_BY_ID) and name.removeprefix(_BY_ID).isdecimal()
    ]
    return tuple(sorted(likely, key=lambda one: -one.logprob))


def _id_in(digits: str) -> int:
    """An id that came as text. Raises BadAnswer."""
    [id] = ids_in([int(digits) if len(digits) <= _MOST_DIGITS else MOST_TOKENS + 1])
    return id

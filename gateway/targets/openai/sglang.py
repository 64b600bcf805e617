"""SGLang by token ids: its own route `/generate` takes `input_ids` and gives `output_ids`.

An event has all ids so far, or, where the server was started with `--incremental-streaming-output`, those since the
last one; `completion_tokens` beside them tells which. A stop token is among them.

Source: "Sampling Parameters" in the documentation of SGLang, and its TokenizerManager, as of 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.targets.openai.dialect import (
    Event,
    Part,
    UpstreamRequest,
    count_in,
    finish_in,
    ids_in,
    logprob_in,
    object_in,
)
from tidegate.generate.request import generate_request
from tidegate.outcome import BadAnswer
from tidegate.token_sink import TopLogprob
from tidegate.types import InferRequest


class SglangDialect:
    """A `Dialect`."""

    def question(self, request: InferRequest, model: str) -> UpstreamRequest:
        asked = generate_request(request, default_max_tokens=1)
        sampling = asked.sampling
        chosen: dict[str, Any] = {
            "max_new_tokens": asked.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1e-6,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "stop_token_ids": asked.stop_tokens,
            "ignore_eos": asked.ignore_stop,
        }
        if sampling.seed is not None:
            chosen["sampling_seed"] = sampling.seed
        if asked.schema:
            chosen["json_schema"] = asked.schema
        body: dict[str, Any] = {"input_ids": asked.prompt, "sampling_params": chosen, "stream": True}
        if asked.logprobs is not None:
            body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": asked.logprobs}
        return UpstreamRequest("/generate", body, from_root=True)

    def reader(self, request: InferRequest) -> SglangReader:
        return SglangReader()

    def __repr__(self) -> str:
        return "<SglangDialect>"


class SglangReader:
    """A `PartReader`."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen = 0

    def part(self, event: Event) -> Part:
        said = object_in(event.get("meta_info"))
        finish = object_in(said.get("finish_reason"))
        if finish.get("type") == "abort":
            raise BadAnswer(
                f"the server gave the answer up: {str(finish.get('message') or 'it gives no reason')[:200]}"
            )
        completed = count_in(said.get("completion_tokens"))
        ids = self._new(ids_in(event.get("output_ids")), completed)
        own, top = _rows(said.get("output_token_logprobs"), ids), _rows(said.get("output_top_logprobs"), ids)
        return Part(
            ids=ids,
            logprobs=tuple([_likelihood(row).logprob for row in own]),
            top=tuple([tuple([_likelihood(one) for one in row or ()]) for row in top]),
            finish=finish_in(finish.get("type")),
            prompt_tokens=count_in(said.get("prompt_tokens")),
            cached_tokens=count_in(said.get("cached_tokens")),
            completion_tokens=completed,
        )

    def _new(self, ids: tuple[int, ...], completed: int | None) -> tuple[int, ...]:
        if completed is not None and self._seen and self._seen + len(ids) == completed:
            new = ids
        elif len(ids) >= self._seen:
            new = ids[self._seen :]
        else:
            raise BadAnswer(f"an event of {len(ids)} ids of which {self._seen} had come")
        self._seen += len(new)
        return new

    def __repr__(self) -> str:
        return f"<SglangReader {self._seen} tokens>"


def _rows(given: object, ids: tuple[int, ...]) -> Sequence[Any]:
    """The last rows of a list, one for each new id."""
    return given[len(given) - len(ids) :] if isinstance(given, list) and len(given) >= len(ids) else ()


def _likelihood(row: object) -> TopLogprob:
    """A row is [logprob, id, text]."""
    if not isinstance(row, list | tuple) or len(row) < 2:
        raise BadAnswer("an event whose likelihoods cannot be read")
    [id] = ids_in([row[1]])
    return TopLogprob(id, logprob_in(row[0]))

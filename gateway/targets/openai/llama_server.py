"""llama-server by token ids: its own route `/completion` takes a list of ids, and gives ids with `return_tokens`.

The server's defaults are its own (a temperature of 0.8, `min_p` of 0.05), so everything that chooses a token is said.
It knows no stop tokens but the model's: others end the answer where it is read.

Of a character of several tokens a stream has the last one only, with the whole character as its text and all of them
counted: what is missing is said in `lost`, and put back by whoever has the model's tokenizer (`progress.py`).

Source: the README of llama.cpp's server; tried with xllamacpp 2026.10.11549.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.targets.openai.dialect import (
    Event,
    Part,
    UpstreamRequest,
    count_in,
    ids_in,
    logprob_in,
    object_in,
    text_in,
)
from tidegate.generate.request import generate_request
from tidegate.generate.usage import FinishReason
from tidegate.outcome import BadAnswer
from tidegate.token_sink import TopLogprob
from tidegate.types import InferRequest

_FIELDS: Final = ("content", "tokens", "stop", "stop_type", "tokens_predicted", "tokens_evaluated", "timings")


class LlamaServerDialect:
    """A `Dialect`."""

    def question(self, request: InferRequest, model: str) -> UpstreamRequest:
        asked = generate_request(request, default_max_tokens=1)
        sampling = asked.sampling
        body: dict[str, Any] = {
            "model": model,
            "prompt": asked.prompt,
            "n_predict": asked.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "typical_p": 1.0,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": asked.ignore_stop,
            "return_tokens": True,
            "response_fields": _FIELDS,  # the last event would have the prompt as well
            "cache_prompt": True,
            "stream": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed & 0xFFFFFFFF
        if asked.logprobs is not None:
            body["n_probs"] = max(1, asked.logprobs)
        if asked.schema:
            body["json_schema"] = msgspec.Raw(asked.schema.encode())
        return UpstreamRequest("/completion", body, from_root=True)

    def reader(self, request: InferRequest) -> LlamaServerReader:
        return LlamaServerReader()

    def __repr__(self) -> str:
        return "<LlamaServerDialect>"


class LlamaServerReader:
    """A `PartReader`."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen = 0  # tokens, those left out included

    def part(self, event: Event) -> Part:
        ids, text = ids_in(event.get("tokens")), text_in(event.get("content"))
        lost = self._count(len(ids), count_in(event.get("tokens_predicted")))
        ended = event.get("stop") is True
        rows = event.get("completion_probabilities")
        whole = isinstance(rows, list) and len(rows) == len(ids) and not lost
        likely = [object_in(row) for row in rows] if whole and isinstance(rows, list) else []
        return Part(
            ids=ids,
            text=text,
            lost=lost if text else 0,  # of a character that did not end there is nothing to put back
            logprobs=tuple([logprob_in(row.get("logprob")) for row in likely]),
            top=tuple([_row(row) for row in likely]),
            finish=_finish(event) if ended else None,
            prompt_tokens=count_in(event.get("tokens_evaluated")),
            cached_tokens=count_in(object_in(event.get("timings")).get("cache_n")),
            completion_tokens=count_in(event.get("tokens_predicted")),
        )

    def _count(self, ids: int, predicted: int | None) -> int:
        """How many tokens were left out before these."""
        lost = 0 if predicted is None else max(0, predicted - self._seen - ids)
        self._seen += ids + lost
        return lost

    def __repr__(self) -> str:
        return f"<LlamaServerReader {self._seen} tokens>"


def _finish(event: Event) -> FinishReason:
    return "length" if event.get("stop_type") == "limit" else "stop"


def _row(row: Mapping[str, Any]) -> tuple[TopLogprob, ...]:
    likely = row.get("top_logprobs")
    found = []
    for one in likely if isinstance(likely, list) else ():
        if not isinstance(one, dict):
            raise BadAnswer("an event whose likelihoods cannot be read")
        [id] = ids_in([one.get("id")])
        found.append(TopLogprob(id, logprob_in(one.get("logprob"))))
    return tuple(found)

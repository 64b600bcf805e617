"""OpenAI's own interface: what the caller sent goes there as it came, and text comes back.

Only what is this side's business is set: the model's name there, that the answer comes as events, and the most tokens
it may have. That number is the one that was checked, reserved and charged here, under the one name that the server
takes: OpenAI has two names for it, of which a caller may give both, and Ollama knows only the older.

To go on with an answer that has begun (`TextPrompt.begun`), its beginning becomes a last message of the assistant.
llama-server goes on behind such a message by itself; vLLM and SGLang are told to.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.targets.openai.dialect import (
    Event,
    Part,
    UpstreamRequest,
    finish_in,
    first_choice,
    object_in,
    text_in,
    usage_in,
)
from tidegate.generate.request import MAX_TOKENS_KEY
from tidegate.outcome import BadAnswer, NotSupported
from tidegate.text_prompt import MESSAGES, PROMPT
from tidegate.types import InferRequest

CONTINUE: Final[Mapping[str, Any]] = {"continue_final_message": True, "add_generation_prompt": False}
_MOST_NAMES: Final = ("max_tokens", "max_completion_tokens")
_BESIDE: Final = ("reasoning_content", "reasoning", "refusal")


class TextDialect:
    """A `Dialect`, and the reader of its events.

    Args:
        most_name: the field for the most tokens of an answer.
        resuming: the fields by which a server is told to go on behind the last message.
    """

    def __init__(self, most_name: str = "max_tokens", resuming: Mapping[str, Any] | None = None) -> None:
        self._most_name = most_name
        self._resuming = resuming or {}

    def question(self, request: InferRequest, model: str) -> UpstreamRequest:
        words = request.text
        if words is None:
            raise NotSupported("this target takes text, and the request has token ids only")
        body: dict[str, Any] = {name: raw for name, raw in words.fields.items() if name not in _MOST_NAMES}
        body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        body[self._most_name] = request.parameters[MAX_TOKENS_KEY]  # each way in sets it
        if words.begun and words.is_chat:
            messages = msgspec.json.decode(words.fields[MESSAGES])
            body |= {MESSAGES: [*messages, {"role": "assistant", "content": words.begun}], **self._resuming}
        elif words.begun:
            body[PROMPT] = msgspec.json.decode(words.fields[PROMPT]) + words.begun
        return UpstreamRequest("/chat/completions" if words.is_chat else "/completions", body)

    def reader(self, request: InferRequest) -> TextDialect:
        return self

    def part(self, event: Event) -> Part:
        choice = first_choice(event)
        said = object_in(choice.get("delta") or choice.get("message"))  # `message`: it came in one piece
        text = text_in(said.get("content")) or text_in(choice.get("text"))
        return usage_in(event)._replace(text=text, more=_more(said), finish=finish_in(choice.get("finish_reason")))

    def __repr__(self) -> str:
        return f"<TextDialect {self._most_name}>"


def _more(said: Mapping[str, Any]) -> Mapping[str, Any] | None:
    more: dict[str, Any] = {name: text_in(said.get(name)) for name in _BESIDE if said.get(name)}
    if calls := said.get("tool_calls"):
        if not isinstance(calls, list) or not all(isinstance(one, dict) for one in calls):
            raise BadAnswer("an event whose calls of tools cannot be read")
        more["tool_calls"] = [_call(at, one) for at, one in enumerate(calls)]
    return more or None


def _call(at: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a tool, or a part of one, with nothing but what OpenAI's form has."""
    function = object_in(given.get("function"))
    index = given.get("index", at)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 1024:
        raise BadAnswer("an event with a call of a tool whose index is none")
    call: dict[str, Any] = {"index": index}
    call |= {key: text_in(given[key]) for key in ("id", "type") if given.get(key)}
    call["function"] = {key: text_in(function[key]) for key in ("name", "arguments") if function.get(key) is not None}
    return call

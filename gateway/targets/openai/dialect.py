"""A dialect is how one kind of server is asked for a generation, and how its events are read.

    vllm.py · sglang.py · llama_server.py    token ids in and out, each server's own way
    text_dialect.py                          text in and out, OpenAI's way, which all of them speak

Pure. What an event holds comes from the network: each value has a bound, and what does not fit is a BadAnswer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from tidegate.generate.usage import FinishReason
from tidegate.outcome import BadAnswer
from tidegate.token_sink import TopLogprob
from tidegate.types import InferRequest

Event = Mapping[str, Any]

MOST_TOKENS: Final = 2**31 - 1
_MOST_AT_ONCE: Final = 2**17  # ids in an event
_FINISHES: Final[Mapping[str, FinishReason]] = {
    "stop": "stop", "length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls",
    "content_filter": "content_filter", "eos_token": "stop", "stop_sequence": "stop", "max_tokens": "length",
}  # fmt: skip


class UpstreamRequest(NamedTuple):
    """A request to a server."""

    path: str  # behind the address, or behind the server's root
    body: Mapping[str, Any]
    from_root: bool = False  # a route of the server's own, which is not under OpenAI's /v1


class Part(NamedTuple):
    """What one event says. What it does not say is left at its default."""

    ids: tuple[int, ...] = ()
    text: str = ""
    lost: int = 0  # tokens before `ids` that the server made and left out; their characters are in `text`
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[TopLogprob, ...], ...] = ()
    more: Mapping[str, Any] | None = None  # beside the text, in OpenAI's form
    finish: FinishReason | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class PartReader(Protocol):
    """Reads the events of one answer, in order."""

    def part(self, event: Event) -> Part:
        """What an event says. Raises BadAnswer."""
        ...


class Dialect(Protocol):
    """Stateless."""

    def question(self, request: InferRequest, model: str) -> UpstreamRequest:
        """The request as this server takes it, for an answer in events. Args: model: its name there."""
        ...

    def reader(self, request: InferRequest) -> PartReader: ...


def ids_in(given: object) -> tuple[int, ...]:
    """The token ids in a value. Raises BadAnswer."""
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > _MOST_AT_ONCE:
        raise BadAnswer("an event whose token ids are no list of a reasonable length")
    for id in given:
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id <= MOST_TOKENS:
            raise BadAnswer("an event with a token id that is none")
    return tuple(given)


def text_in(given: object) -> str:
    """The text in a value; none is "". Raises BadAnswer."""
    if given is None:
        return ""
    if not isinstance(given, str):
        raise BadAnswer("an event whose text is none")
    return given


def count_in(given: object) -> int | None:
    """A count of tokens; None of what is none, since a wrong count spoils no answer."""
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= MOST_TOKENS:
        return None
    return given


def logprob_in(given: object) -> float:
    """A logarithm of a probability; what is no number is as good as impossible. Raises BadAnswer."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return -9999.0
    try:
        return min(0.0, max(-9999.0, float(given)))
    except OverflowError as error:  # JSON's whole numbers may have thousands of digits
        raise BadAnswer("an event with a likelihood that is beyond any number") from error


def finish_in(given: object) -> FinishReason | None:
    """Why it ended; a reason that nobody here knows is a `stop`."""
    if given is None:
        return None
    return _FINISHES.get(given, "stop") if isinstance(given, str) else "stop"


def object_in(given: object) -> Mapping[str, Any]:
    """A JSON object; an empty one for anything else."""
    return given if isinstance(given, dict) else {}


def first_choice(event: Event) -> Mapping[str, Any]:
    """The choice of an event in OpenAI's form, of which one was asked for."""
    choices = event.get("choices")
    return object_in(choices[0]) if isinstance(choices, list) and choices else {}


def usage_in(event: Event) -> Part:
    """The counts that an event in OpenAI's form has, if any."""
    usage = object_in(event.get("usage"))
    details = object_in(usage.get("prompt_tokens_details"))
    return Part(
        prompt_tokens=count_in(usage.get("prompt_tokens")),
        cached_tokens=count_in(details.get("cached_tokens")),
        completion_tokens=count_in(usage.get("completion_tokens")),
    )

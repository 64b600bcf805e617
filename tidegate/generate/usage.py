"""How a generation ended and what it took: the parameters of its answer, which is an OIP response like any other.

Pure. A target is not trusted to say this right: what cannot be read is a BadAnswer, and what is more than can be is
clipped by the one that asked it (`clipped_usage`), since tenants pay by these counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

import msgspec
from msgspec.structs import replace

from tidegate.outcome import BadAnswer
from tidegate.types import InferResponse, Parameter

FINISH_KEY: Final = "finish_reason"
PROMPT_KEY: Final = "prompt_tokens"
CACHED_KEY: Final = "cached_tokens"
COMPLETION_KEY: Final = "completion_tokens"
PREFILL_KEY: Final = "prefill_us"
DECODE_KEY: Final = "decode_us"
_MOST: Final = 2**53

STOPPED: Final = "a stop string ended the text"  # why a front cancels a generation of which it has all it wants
SPENT: Final = "its tenant's tokens are used up"  # why a generation is cut that has had all that is paid for

# A stop token, or max_tokens or the context; the others only from servers of other makers.
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
_REASONS: Final = get_args(FinishReason)


class Usage(msgspec.Struct, frozen=True):
    """What one generation took. Times are of the engine, without any queue or link."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int  # with the stop token, where one ended it
    cached_tokens: int = 0  # of the prompt, those that came from a cache
    prefill_s: float = 0.0  # until the first token
    decode_s: float = 0.0  # from the first token to the last


class Generated(msgspec.Struct, frozen=True):
    """A whole generation."""

    ids: tuple[int, ...]  # without the stop token
    usage: Usage


def usage_parameters(usage: Usage) -> dict[str, Parameter]:
    """The parameters of the answer."""
    return {
        FINISH_KEY: usage.finish_reason,
        PROMPT_KEY: usage.prompt_tokens,
        CACHED_KEY: usage.cached_tokens,
        COMPLETION_KEY: usage.completion_tokens,
        PREFILL_KEY: round(1e6 * usage.prefill_s),
        DECODE_KEY: round(1e6 * usage.decode_s),
    }


def usage_if_generated(response: InferResponse) -> Usage | None:
    """What an answer says it took; None of one that is no generation, or whose counts cannot be read.

    For whoever counts: that an answer is bad is said by its front, which refuses it.
    """
    said = response.parameters
    if not said or FINISH_KEY not in said:
        return None
    try:
        return usage_of(response)
    except BadAnswer:
        return None


def usage_of(response: InferResponse) -> Usage:
    """What an answer says it took. Raises BadAnswer."""
    said = response.parameters
    reason = said.get(FINISH_KEY)
    if reason not in _REASONS:
        raise BadAnswer(f"a generation that ended for {reason!r}: {' or '.join(_REASONS)} was expected")
    prompt, completion, cached = _count(said, PROMPT_KEY), _count(said, COMPLETION_KEY), _count(said, CACHED_KEY)
    prefill_s, decode_s = _count(said, PREFILL_KEY) / 1e6, _count(said, DECODE_KEY) / 1e6
    return Usage(reason, prompt, completion, cached, prefill_s, decode_s)  # type: ignore[arg-type]


def _count(said: Mapping[str, Parameter], key: str) -> int:
    count = said.get(key, 0)
    if type(count) is not int or not 0 <= count <= _MOST:  # True is an int as well
        raise BadAnswer("a generation whose counts of tokens and microseconds cannot be read")
    return count


def clipped_usage(
    response: InferResponse, *, prompt_tokens: int, completion_tokens: int, took_s: float
) -> InferResponse:
    """An answer that says no more than it can have taken; the same object where it did not, or is no generation.

    Args:
        prompt_tokens: the most that its prompt has.
        completion_tokens: the most that were asked for.
        took_s: from the question to the answer.
    """
    usage = usage_if_generated(response)
    if usage is None or (
        usage.prompt_tokens <= prompt_tokens
        and usage.completion_tokens <= completion_tokens
        and usage.cached_tokens <= usage.prompt_tokens
        and usage.prefill_s + usage.decode_s <= took_s
    ):
        return response
    prompt, prefill_s = min(usage.prompt_tokens, prompt_tokens), min(usage.prefill_s, took_s)
    possible = Usage(
        usage.finish_reason,
        prompt,
        min(usage.completion_tokens, completion_tokens),
        min(usage.cached_tokens, prompt),
        prefill_s,
        min(usage.decode_s, took_s - prefill_s),
    )
    return replace(response, parameters={**response.parameters, **usage_parameters(possible)})

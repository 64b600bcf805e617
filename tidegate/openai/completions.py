"""The body of a completion: one prompt, as text or as token ids.

Pure.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tidegate.openai.generation_fields import GenerationFields, GenerationOptions, options_of
from tidegate.openai.passed_fields import passed_fields
from tidegate.openai.wrong_parameter import WrongParameter, decoded
from tidegate.text_prompt import TextPrompt

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's

_Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class CompletionBody(GenerationFields, frozen=True, kw_only=True):
    prompt: str | list[str | _Token | list[_Token]]
    logprobs: int | None = None
    # refused, unless they ask for nothing
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class CompletionRequest(msgspec.Struct, frozen=True):
    options: GenerationOptions
    prompt: str | tuple[int, ...]
    words: TextPrompt  # the request as it came, for a target that takes text


def parse(body: bytes) -> CompletionRequest:
    """The request in a body. Raises WrongParameter, InvalidRequest."""
    asked = decoded(body, _decode)
    options = options_of(
        asked, max_tokens=asked.max_tokens, logprobs=asked.logprobs, default_max_tokens=DEFAULT_MAX_TOKENS
    )
    words = passed_fields(body, response_format=asked.response_format, schema=options.schema)
    return CompletionRequest(options, _prompt(asked.prompt), words)


_decode = msgspec.json.Decoder(CompletionBody).decode


def _prompt(given: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    """The one prompt, of the four forms that OpenAI allows."""
    if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
        (given,) = given  # type: ignore[assignment]
    if isinstance(given, str):
        return given
    ids = [one for one in given if isinstance(one, int)]
    if len(ids) != len(given):
        raise WrongParameter("prompt", f"prompt has {len(given)} entries: one prompt a request is served")
    if not ids:
        raise WrongParameter("prompt", "prompt must not be empty")
    return tuple(ids)

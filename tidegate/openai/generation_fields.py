"""What chat completions and completions have in common: how the next token is chosen, when the text ends, how it comes.

Fields of OpenAI's that would change the answer and are not served are refused by name, as long as they ask for
anything: an SDK that sends every field at its default is served. Fields that change nothing (`user`, `store`) are
passed by. `top_k`, `min_p`, `ignore_eos` and `stop_token_ids` are those of vLLM.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from tidegate.generate.json_schema import MAX_BYTES as MAX_SCHEMA_BYTES
from tidegate.generate.json_schema import BadSchema, check_schema_text
from tidegate.generate.request import MAX_LOGPROBS, MAX_STOP_TOKENS, GenerateRequest, Sampling
from tidegate.generate.unserved_parameters import unserved_name
from tidegate.models.generative import Generative
from tidegate.oip.content_limits import ContentLimits
from tidegate.oip.generation.bounds import output_tokens
from tidegate.openai.wrong_parameter import WrongParameter, decoded_field
from tidegate.outcome import InvalidRequest

MAX_STOP_STRINGS: Final = 4  # OpenAI's own limit
MAX_STOP_CHARACTERS: Final = 1024
# As it comes, with blanks and escapes, of which the schema's own limit knows nothing.
MAX_RAW_SCHEMA_BYTES: Final = 8 * MAX_SCHEMA_BYTES
DEFAULT_TEMPERATURE: Final = 1.0  # OpenAI's

_Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with every event


class ResponseSchema(msgspec.Struct, frozen=True):
    schema: msgspec.Raw  # decoded once it is known to be short enough
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: ResponseSchema | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[_Token], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    response_format: ResponseFormat | None = None
    # refused, unless they ask for nothing
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # the same, of vLLM's
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    min_tokens: int | None = None
    use_beam_search: bool | None = None
    bad_words: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


class GenerationOptions(msgspec.Struct, frozen=True):
    """What a caller wants of an answer, beside its prompt."""

    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stop: tuple[str, ...]
    max_tokens: int | None  # None leaves it to the model
    sampling: Sampling
    ignore_stop: bool
    stop_tokens: tuple[int, ...]
    logprobs: int | None
    schema: str
    default_max_tokens: int | None = None  # of a request that does not say; None: the model's


def options_of(
    fields: GenerationFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    default_max_tokens: int | None = None,
) -> GenerationOptions:
    """The options in a body. Raises WrongParameter."""
    if fields.n not in (None, 1):
        raise WrongParameter("n", f"n is {fields.n}: one answer a request is served")
    if (name := unserved_name(msgspec.structs.asdict(fields))) is not None:
        raise WrongParameter(name, f"{name} is not served: leave it out")
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise WrongParameter("logprobs", f"{logprobs} logprobs a token are asked for; from 0 to {MAX_LOGPROBS} may be")
    streams = fields.stream_options or StreamOptions()
    if fields.stream_options is not None and not fields.stream:
        raise WrongParameter("stream_options", "stream_options is for stream: true")
    return GenerationOptions(
        model=fields.model,
        stream=bool(fields.stream),
        include_usage=bool(streams.include_usage),
        continuous_usage=bool(streams.include_usage and streams.continuous_usage_stats),
        stop=_stop_strings(fields.stop),
        max_tokens=max_tokens,
        sampling=Sampling(
            DEFAULT_TEMPERATURE if fields.temperature is None else fields.temperature,
            1.0 if fields.top_p is None else fields.top_p,
            max(0, fields.top_k or 0),  # -1 is vLLM's "of all"
            fields.seed,
            fields.min_p or 0.0,
        ),
        ignore_stop=bool(fields.ignore_eos),
        stop_tokens=tuple(fields.stop_token_ids or ()),
        logprobs=logprobs,
        schema=_schema(fields.response_format),
        default_max_tokens=default_max_tokens,
    )


def refuse_unserved(asked: Mapping[str, object]) -> None:
    """Raises WrongParameter for the first that asks for anything."""
    for name, value in asked.items():
        if value:
            raise WrongParameter(name, f"{name} is not served: leave it out")


def generate_request(
    options: GenerationOptions, prompt: tuple[int, ...], model: Generative, limits: ContentLimits
) -> GenerateRequest:
    """The request to a target. Raises WrongParameter for what the model has no room for, or does not know."""
    size = model.vocabulary_size
    if not model.is_text_only and (unknown := [id for id in options.stop_tokens if id >= size]):
        raise WrongParameter(
            "stop_token_ids", f"stop_token_ids has {unknown[0]}, which is not in the vocabulary of {size}"
        )
    try:
        most = output_tokens(model, len(prompt), options.max_tokens, limits)
    except InvalidRequest as error:
        raise WrongParameter("max_tokens", error.message) from error
    if options.max_tokens is None and options.default_max_tokens is not None:
        most = min(most, options.default_max_tokens)
    return GenerateRequest(
        prompt,
        most,
        options.sampling,
        stop_tokens=options.stop_tokens,
        ignore_stop=options.ignore_stop,
        logprobs=options.logprobs,
        schema=options.schema,
    )


def _stop_strings(given: str | list[str] | None) -> tuple[str, ...]:
    strings = (given,) if isinstance(given, str) else tuple(given or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise WrongParameter("stop", f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} may be")
    if not all(0 < len(one) <= MAX_STOP_CHARACTERS for one in strings):
        raise WrongParameter("stop", f"a string of stop must have from 1 to {MAX_STOP_CHARACTERS} characters")
    return strings


_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def _schema(wanted: ResponseFormat | None) -> str:
    if wanted is None or wanted.type == "text":
        return ""
    if wanted.type == "json_object":
        return '{"type":"object"}'
    if wanted.json_schema is None:
        raise WrongParameter("response_format", "response_format of type json_schema needs json_schema.schema")
    schema = decoded_field("response_format", wanted.json_schema.schema, _decode_object, max_bytes=MAX_RAW_SCHEMA_BYTES)
    text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
    try:
        check_schema_text(text)
    except BadSchema as error:
        raise WrongParameter("response_format", str(error)) from error
    return text

"""One generation as it is asked of a target: token ids in, with how the next one is chosen and when to stop.

It travels as an OIP request, so that every layer, check and wire treats it as it treats the others: the prompt is the
input `input_ids`, everything else is a parameter. Text, chat templates and stop strings stay with whoever speaks to
the caller: a target knows tokens only, and any target with the same vocabulary may go on with them.

Pure. Everything here may come from the network: each number has a bound, and an error names the key and the way out.
"""

from __future__ import annotations

import struct
from math import isfinite
from typing import Final

import msgspec

from tidegate.generate.json_schema import BadSchema, check_schema_text
from tidegate.models.generative import ANSWER_OUTPUT, MAX_TOKENS, PROMPT_INPUT
from tidegate.outcome import InvalidRequest
from tidegate.text_prompt import TextPrompt
from tidegate.types import Datatype, InferRequest, Parameter, Parameters, Tensor

INPUT_IDS: Final = PROMPT_INPUT
TEXT_INPUT: Final = "text_input"
OUTPUT_IDS: Final = ANSWER_OUTPUT
TEXT_OUTPUT: Final = "text_output"

MAX_TOKENS_KEY: Final = MAX_TOKENS
TEMPERATURE_KEY: Final = "temperature"
TOP_P_KEY: Final = "top_p"
TOP_K_KEY: Final = "top_k"
MIN_P_KEY: Final = "min_p"
SEED_KEY: Final = "seed"
LOGPROBS_KEY: Final = "logprobs"
STOP_TOKENS_KEY: Final = "stop_token_ids"
IGNORE_STOP_KEY: Final = "ignore_eos"
SCHEMA_KEY: Final = "json_schema"
ANSWERED_KEY: Final = "answered_tokens"
CACHE_SALT_KEY: Final = "cache_salt"  # as vLLM calls it

MAX_TEMPERATURE: Final = 2.0
MAX_LOGPROBS: Final = 20
MAX_STOP_TOKENS: Final = 64
MAX_CACHE_SALT: Final = 128  # characters
MAX_OUTPUT_TOKENS: Final = 2**20  # of any model; each has its own context
_MAX_TOKEN: Final = 2**31 - 1
_MAX_SEED: Final = 2**63 - 1


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen."""

    temperature: float = 0.0  # 0 always takes the most likely one
    top_p: float = 1.0
    top_k: int = 0  # 0: of all
    seed: int | None = None  # None: of chance
    min_p: float = 0.0  # only tokens that are so likely, as a share of the likeliest


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation as an engine gets it."""

    prompt: tuple[int, ...]  # token ids, at least one
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: tuple[int, ...] = ()  # beyond the model's own
    ignore_stop: bool = False  # go on to max_tokens, for load generators
    logprobs: int | None = None  # None: none; n: of each token, and of the n most likely ones in its place
    schema: str = ""  # JSON schema that the text has to follow; "": none
    answered: int = 0  # tokens at the end of the prompt that are of the answer already: another engine made them
    cache_salt: str = ""  # only prompts with the same one share what an engine keeps of them

    def __repr__(self) -> str:
        return f"<GenerateRequest {len(self.prompt)}+{self.max_tokens} tokens>"


def infer_request(
    model: str, request: GenerateRequest, *, version: str = "", id: str = "", parameters: Parameters | None = None
) -> InferRequest:
    """The request as it travels. `parameters` are others that go with it."""
    return InferRequest(
        model,
        (ids_tensor(INPUT_IDS, request.prompt),),
        version,
        id,
        parameters={**(parameters or {}), **_parameters(request)},
    )


def words_request(
    model: str, words: TextPrompt, request: GenerateRequest, *, version: str = "", id: str = ""
) -> InferRequest:
    """The request as it goes to a target that takes text; the prompt of `request` is not looked at."""
    return InferRequest(model, (), version, id, parameters=_parameters(request), text=words)


def generate_request(request: InferRequest, *, default_max_tokens: int) -> GenerateRequest:
    """What an OIP request asks for. Raises InvalidRequest, naming the key.

    Args:
        default_max_tokens: of a request that does not say.
    """
    prompt = next((tensor for tensor in request.inputs if tensor.name == INPUT_IDS), None)
    if prompt is None:
        raise InvalidRequest(f"input {INPUT_IDS!r} is missing: the prompt's token ids")
    said = request.parameters
    return GenerateRequest(
        ids_of(prompt),
        _whole(said, MAX_TOKENS_KEY, default_max_tokens, least=1, most=MAX_OUTPUT_TOKENS),
        Sampling(
            _real(said, TEMPERATURE_KEY, 0.0, least=0.0, most=MAX_TEMPERATURE),
            _real(said, TOP_P_KEY, 1.0, least=0.0, most=1.0),
            _whole(said, TOP_K_KEY, 0, least=0, most=_MAX_TOKEN),
            _whole(said, SEED_KEY, 0, least=-_MAX_SEED - 1, most=_MAX_SEED) if SEED_KEY in said else None,
            _real(said, MIN_P_KEY, 0.0, least=0.0, most=1.0),
        ),
        stop_tokens=_stop_tokens(said),
        ignore_stop=_flag(said, IGNORE_STOP_KEY),
        logprobs=_whole(said, LOGPROBS_KEY, 0, least=0, most=MAX_LOGPROBS) if LOGPROBS_KEY in said else None,
        schema=_schema(said),
        answered=_whole(said, ANSWERED_KEY, 0, least=0, most=MAX_OUTPUT_TOKENS),
        cache_salt=_cache_salt(said),
    )


def ids_tensor(name: str, ids: tuple[int, ...]) -> Tensor:
    """Token ids as an INT32 tensor of one axis."""
    return Tensor(name, Datatype.INT32, (len(ids),), struct.pack(f"<{len(ids)}i", *ids))


def ids_of(tensor: Tensor) -> tuple[int, ...]:
    """The token ids of an INT32 tensor. Raises InvalidRequest."""
    if tensor.datatype is not Datatype.INT32 or len(tensor.raw) % 4:
        raise InvalidRequest(f"input {tensor.name!r} is {tensor.datatype.value}: token ids are INT32")
    return struct.unpack(f"<{len(tensor.raw) // 4}i", tensor.raw)


def _parameters(request: GenerateRequest) -> dict[str, Parameter]:
    """The parameters of a request; those at their defaults are left out."""
    sampling = request.sampling
    said: dict[str, Parameter] = {MAX_TOKENS_KEY: request.max_tokens}
    if sampling.temperature:
        said[TEMPERATURE_KEY] = sampling.temperature
    if sampling.top_p != 1.0:
        said[TOP_P_KEY] = sampling.top_p
    if sampling.top_k:
        said[TOP_K_KEY] = sampling.top_k
    if sampling.min_p:
        said[MIN_P_KEY] = sampling.min_p
    if sampling.seed is not None:
        said[SEED_KEY] = sampling.seed
    if request.stop_tokens:
        said[STOP_TOKENS_KEY] = ",".join(map(str, request.stop_tokens))
    if request.ignore_stop:
        said[IGNORE_STOP_KEY] = True
    if request.logprobs is not None:
        said[LOGPROBS_KEY] = request.logprobs
    if request.schema:
        said[SCHEMA_KEY] = request.schema
    if request.answered:
        said[ANSWERED_KEY] = request.answered
    if request.cache_salt:
        said[CACHE_SALT_KEY] = request.cache_salt
    return said


def _whole(said: Parameters, key: str, default: int, *, least: int, most: int) -> int:
    value = said.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidRequest(f"parameter {key!r} is {value!r}: a whole number from {least} to {most} is wanted")
    return value


def _real(said: Parameters, key: str, default: float, *, least: float, most: float) -> float:
    value = said.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InvalidRequest(f"parameter {key!r} is {value!r}: a number from {least:g} to {most:g} is wanted")
    if not least <= value <= most:
        raise InvalidRequest(f"parameter {key!r} is {value!r}: a number from {least:g} to {most:g} is wanted")
    return float(value)


def _flag(said: Parameters, key: str) -> bool:
    value = said.get(key, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"parameter {key!r} is {value!r}: true or false is wanted")
    return value


def _stop_tokens(said: Parameters) -> tuple[int, ...]:
    value = said.get(STOP_TOKENS_KEY, "")
    words = value.split(",") if isinstance(value, str) and value else []
    if not isinstance(value, str) or len(words) > MAX_STOP_TOKENS or not all(_is_token(word) for word in words):
        raise InvalidRequest(
            f"parameter {STOP_TOKENS_KEY!r} is not understood: at most {MAX_STOP_TOKENS} token ids with commas between"
        )
    return tuple(map(int, words))


def _is_token(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 10 and int(word) <= _MAX_TOKEN


def _cache_salt(said: Parameters) -> str:
    value = said.get(CACHE_SALT_KEY, "")
    if not isinstance(value, str) or len(value) > MAX_CACHE_SALT:
        raise InvalidRequest(f"parameter {CACHE_SALT_KEY!r}: a text of at most {MAX_CACHE_SALT} characters is wanted")
    return value


def _schema(said: Parameters) -> str:
    value = said.get(SCHEMA_KEY, "")
    if not isinstance(value, str):
        raise InvalidRequest(f"parameter {SCHEMA_KEY!r}: a JSON schema is wanted, as text")
    if value:
        try:
            check_schema_text(value)
        except BadSchema as error:
            raise InvalidRequest(f"parameter {SCHEMA_KEY!r}: {error}") from error
    return value

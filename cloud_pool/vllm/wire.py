"""vLLM's token route in bytes: the request that it takes, and the events that it streams back.

    POST /inference/v1/generate     token ids and sampling parameters, with `stream`
    data: {"choices": [{…}]}        tokens, as they are made; the last of them with `finish_reason`
    data: {"choices": [], "usage"}  what it took, the prompt's cached tokens among it
    data: {"error": {…}}            instead of either, also after the status 200
    data: [DONE]

What differs from ours, and is said here:
* Our own list says which tokens end a text: `ignore_eos` is always set, and `stop_token_ids` holds the list. With
  `ignore_stop` none of them may come at all, which is what vLLM does until `min_tokens`.
* vLLM counts the sampled token among the likeliest of its place and cuts the list after as many as were asked for, so
  one more is asked for.

Pure. Nothing that comes is trusted: what cannot be read is an UnexpectedMessage.
Source: `vllm/entrypoints/scale_out/token_in_token_out/` (`protocol.py`, `serving.py`) of 0.32.0, and recorded answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec

from cloud_pool.vllm.command_line import SERVED_NAME
from tidegate.engines.generation.sampling import is_greedy
from tidegate.generate.request import GenerateRequest
from tidegate.workers.generation.messages import UnexpectedMessage

GENERATE_PATH: Final = "/inference/v1/generate"
MAX_EVENT_BYTES: Final = 1 << 20
_MAX_TEXT: Final = 1000  # characters of an error that go on
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_MAX_TOP_P: Final = 1.0

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]


class LikelyToken(msgspec.Struct, frozen=True):
    """One of the likeliest tokens of a place."""

    token_id: TokenId
    logprob: float


class ChosenToken(msgspec.Struct, frozen=True):
    """The token of a place, and the likeliest ones there."""

    token_id: TokenId
    logprob: float
    top_logprobs: tuple[LikelyToken, ...] = ()


class ChosenTokens(msgspec.Struct, frozen=True):
    """Of each token of a choice."""

    content: tuple[ChosenToken, ...] | None = None


class StreamChoice(msgspec.Struct, frozen=True):
    """The next tokens of the one answer."""

    index: int
    token_ids: tuple[TokenId, ...] | None = None
    finish_reason: str | None = None
    logprobs: ChosenTokens | None = None


class CachedTokens(msgspec.Struct, frozen=True):
    """`prompt_tokens_details`."""

    cached_tokens: Tokens | None = None


class StreamUsage(msgspec.Struct, frozen=True):
    """What an answer took."""

    prompt_tokens: Tokens
    completion_tokens: Tokens | None = None
    prompt_tokens_details: CachedTokens | None = None


class ServerFault(msgspec.Struct, frozen=True):
    """Why there is no answer, or no more of it. `code` is an HTTP status."""

    message: str
    code: int = 500


class StreamEvent(msgspec.Struct, frozen=True):
    """One event of a stream."""

    choices: tuple[StreamChoice, ...] = ()
    usage: StreamUsage | None = None
    error: ServerFault | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an answer with a status of 400 or more."""

    error: ServerFault


_EVENTS: Final = msgspec.json.Decoder(StreamEvent)
_ERRORS: Final = msgspec.json.Decoder(ErrorBody)


def request_body(request: GenerateRequest, prompt: Sequence[int], max_tokens: int, stop_tokens: Sequence[int]) -> bytes:
    """The body of the request.

    Args:
        max_tokens: as far as the context has room.
        stop_tokens: the model's own; those of the request are added.
    """
    sampling = request.sampling
    said: dict[str, object] = {
        "max_tokens": max_tokens,
        "temperature": 0.0 if is_greedy(sampling) else sampling.temperature,
        "ignore_eos": True,
        "detokenize": False,
        "stop_token_ids": sorted({*stop_tokens, *(() if request.ignore_stop else request.stop_tokens)}),
    }
    if request.ignore_stop:
        said["min_tokens"] = max_tokens
    if not is_greedy(sampling):
        said |= {"top_p": min(sampling.top_p, _MAX_TOP_P), "top_k": sampling.top_k}
        if sampling.min_p:
            said["min_p"] = sampling.min_p
        if sampling.seed is not None:
            said["seed"] = sampling.seed % 2**63  # -1 would be no seed
    if request.logprobs is not None:
        said["logprobs"] = request.logprobs + 1 if request.logprobs else 0
    return msgspec.json.encode(
        {
            "model": SERVED_NAME,
            "token_ids": prompt,
            "sampling_params": said,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"cache_salt": request.cache_salt} if request.cache_salt else {}),
        }
    )


class EventLines:
    """Mutable: cuts what comes into events; `feed` gives the payloads that are complete, without `[DONE]`."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """One by one, so that those before a bad one count, however many came in one piece.

        Raises UnexpectedMessage: an event is too long, is no event, or follows the end.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            _check_size(line)
            if (payload := self._payload(line.strip())) is not None:
                yield payload
        _check_size(self._rest)

    def _payload(self, line: bytes) -> bytes | None:
        if not line or line.startswith(b":"):
            return None  # the end of an event, or a comment
        if self.done or not line.startswith(_DATA):
            raise UnexpectedMessage(f"{line[:80]!r} where an event was due")
        payload = line[len(_DATA) :].strip()
        if payload != _DONE:
            return payload
        self.done = True
        return None

    def __repr__(self) -> str:
        return f"<EventLines {'done' if self.done else f'{len(self._rest)} bytes of an event'}>"


def _check_size(line: bytes) -> None:
    if len(line) > MAX_EVENT_BYTES:
        raise UnexpectedMessage(f"an event of over {MAX_EVENT_BYTES} bytes")


def read_event(payload: bytes) -> StreamEvent:
    """Raises UnexpectedMessage."""
    try:
        return _EVENTS.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnexpectedMessage(f"an event that cannot be read ({error}): {payload[:200]!r}") from error


def fault_of(status: int, body: bytes) -> ServerFault:
    """Why a request was answered with this status; the body's own words, where it has some."""
    try:
        message = _ERRORS.decode(body).error.message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = body[:_MAX_TEXT].decode("utf-8", "replace").strip() or "no reason is given"
    return ServerFault(message[:_MAX_TEXT], status)

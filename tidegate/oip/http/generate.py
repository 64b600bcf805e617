"""Triton's generate extension: one text in, one text out, at once or as server-sent events.

    POST /v2/models/NAME[/versions/VERSION]/generate
    POST /v2/models/NAME[/versions/VERSION]/generate_stream

The body is a JSON object: the inputs by name (`text_input`, or `input_ids` as a list), and parameters beside them or
under `parameters`. So is the answer, and each event: the outputs and, at the end, the parameters by name. What goes
wrong after the first token is an event with `error`.

Source: Triton Inference Server, "Generate Extension".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from tidegate import clock
from tidegate.arrays import split_bytes
from tidegate.generate.request import INPUT_IDS, OUTPUT_IDS, TEXT_INPUT, TEXT_OUTPUT, ids_of, ids_tensor
from tidegate.generate.text.text_side import TextSides
from tidegate.oip.body_budget import BodyLimits, BodyMemory
from tidegate.oip.call import call_of, kept_headers
from tidegate.oip.content_limits import ContentLimits
from tidegate.oip.generation.answer import Piece
from tidegate.oip.generation.bounds import generative_of
from tidegate.oip.generation.oip_generation import STOP_KEY, OipGeneration, checked_stop
from tidegate.oip.guard import Guard
from tidegate.oip.http.body import read_body
from tidegate.oip.http.event_stream import EventStream, resumed_comments
from tidegate.oip.http.guard import credentials_over_http
from tidegate.oip.http.json_bounds import check_prompt_json
from tidegate.oip.http.responses import RefusalObserver, error_body, json_response
from tidegate.oip.offload import CodecThreads
from tidegate.oip.parameters import checked
from tidegate.oip.reply import CUT_KEY, RESUMED_KEY, reply_parameters
from tidegate.oip.unknown_headers import warn_of_unknown
from tidegate.outcome import InvalidRequest, ServeError
from tidegate.types import Datatype, InferRequest, InferResponse, Parameter, Tensor

PROTOCOL: Final = "oip-http"

_ID: Final = "id"
_PARAMETERS: Final = "parameters"
_NOT_PASSED: Final = frozenset({TEXT_INPUT, INPUT_IDS, _ID, _PARAMETERS, STOP_KEY, "stream"})
_NO_WORDS: Final[Mapping[str, str]] = {}
_encode = msgspec.json.Encoder().encode


class GenerateRoutes:
    """The handlers over what the guard gives each caller.

    Args:
        texts: None: token ids only.
        on_refused: called with (protocol, model name, error) for each request refused here, before the host saw it.
        held: the memory budget for large bodies, shared with other protocols.
        aside: the threads for large bodies, shared with the other routes of the protocol.
    """

    def __init__(
        self,
        guard: Guard,
        texts: TextSides | None,
        *,
        max_body_bytes: int,
        limits: ContentLimits,
        body_limits: BodyLimits,
        held: BodyMemory,
        aside: CodecThreads,
        on_refused: RefusalObserver | None,
    ) -> None:
        self._guard = guard
        self._texts = texts
        self._max_body_bytes = max_body_bytes
        self._limits = limits
        self._body_limits = body_limits
        self._held = held
        self._aside = aside
        self._on_refused = on_refused

    def __repr__(self) -> str:
        return f"<GenerateRoutes {self._guard!r}>"

    async def whole(self, request: web.Request) -> web.StreamResponse:
        generation, headers = await self._asked(request, whole=True)
        reply = await generation.whole()
        words = reply_parameters(reply)
        warn_of_unknown(words, headers)
        return json_response(_fields(reply.response), headers=words)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        generation, headers = await self._asked(request, whole=False)
        async with generation.answer as answer:
            pieces = await answer.take()  # whatever is wrong until here is answered with its status
            events = EventStream(request, stall_s=self._body_limits.stall_s)
            words = answer.words
            warn_of_unknown(words, headers)
            try:
                with answer.follow(self._guard, credentials_over_http(request, PROTOCOL)):
                    await events.begin(words)
                    await _write(events, generation, pieces)
                    await events.end()
            except ConnectionError:  # the caller has left: leaving `answer` cancels what is under way
                pass
            except Exception as error:
                await _break_off(events, error)
        return events.response

    async def _asked(self, request: web.Request, *, whole: bool) -> tuple[OipGeneration, Mapping[str, str]]:
        """The checked generation. Nothing of its body is held any more when it returns."""
        arrived_at, name = clock.now(), request.match_info["model"]
        try:
            host = await self._guard.admit(credentials_over_http(request, PROTOCOL))
            version = request.match_info.get("version", "")
            manifest = host.manifest(name, version)
            generative_of(manifest)
            with self._held.share() as share:
                most_bytes = min(self._max_body_bytes, self._limits.max_prompt_bytes)
                body = await read_body(request, most_bytes, limits=self._body_limits, share=share)
                asked, stop = await self._aside.run(len(body), partial(_request_of, body, self._limits, name, version))
                self._limits.check_parameters(asked.parameters)
                headers = kept_headers(request.headers.items())
                call = call_of(asked, manifest, protocol=PROTOCOL, headers=headers, arrived_at=arrived_at)
                generation = await OipGeneration.of(
                    host, call, manifest, self._texts, self._limits, stop=stop, whole=whole
                )
        except ServeError as error:
            if self._on_refused is not None:
                self._on_refused(PROTOCOL, name, error)
            raise
        return generation, headers


async def _write(events: EventStream, generation: OipGeneration, pieces: list[Piece]) -> None:
    answer = generation.answer

    def told(new: list[Piece]) -> bytes:
        said = b"".join([_event(_fields(generation.response([one]))) for one in new])
        new_resumed = answer.new_resumed()
        return resumed_comments(new_resumed) + said if new_resumed else said

    while pieces:
        await events.write(told(pieces))
        while not await answer.hand_on(lambda new: events.push(told(new))):
            await events.drain()
        pieces = await answer.take()
    last = generation.response([], answer.usage)
    await events.write(resumed_comments(answer.new_resumed()) + _event(_fields(last, answer.words)))


async def _break_off(events: EventStream, error: Exception) -> None:
    try:
        await events.write(_event(error_body(error)))
        await events.end()
    except ConnectionError:
        pass


def _request_of(body: bytes, limits: ContentLimits, model: str, version: str) -> tuple[InferRequest, tuple[str, ...]]:
    """The request in a body, and its stop strings. Raises InvalidRequest, TooLarge."""
    check_prompt_json(body, limits, ids=True)
    try:
        said = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the request's JSON is wrong: {error}") from error
    given = said.get(_PARAMETERS) or {}
    if not isinstance(given, dict):
        raise InvalidRequest(f"{_PARAMETERS!r} must be an object")
    given = {**{name: value for name, value in said.items() if name != _PARAMETERS}, **given}
    id = said.get(_ID, "")
    if not isinstance(id, str):
        raise InvalidRequest(f"{_ID!r} must be a text")
    request = InferRequest(model, _inputs(said), version, id, parameters=checked(_passed(given)))
    return request, _stop(given.get(STOP_KEY) or [])


def _inputs(said: Mapping[str, Any]) -> tuple[Tensor, ...]:
    inputs = []
    if TEXT_INPUT in said:
        text = said[TEXT_INPUT]
        if isinstance(text, list) and len(text) == 1:
            (text,) = text
        if not isinstance(text, str):
            raise InvalidRequest(f"{TEXT_INPUT!r} must be one text")
        raw = text.encode()
        inputs.append(Tensor(TEXT_INPUT, Datatype.BYTES, (1,), struct.pack("<I", len(raw)) + raw))
    if INPUT_IDS in said:
        ids = said[INPUT_IDS]
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < 2**31 for id in ids):
            raise InvalidRequest(f"{INPUT_IDS!r} must be a list of token ids")
        inputs.append(ids_tensor(INPUT_IDS, tuple(ids)))
    return tuple(inputs)


def _passed(given: Mapping[str, Any]) -> dict[str, Parameter]:
    passed: dict[str, Parameter] = {}
    for name, value in given.items():
        if name in _NOT_PASSED or value is None:
            continue
        if not isinstance(value, bool | int | float | str):
            raise InvalidRequest(f"parameter {name[:60]!r} must be a number, a text, true or false")
        passed[name] = value
    return passed


def _stop(given: object) -> tuple[str, ...]:
    strings = [given] if isinstance(given, str) else given
    if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
        raise InvalidRequest(f"{STOP_KEY!r} must be a text or a list of texts")
    return checked_stop(strings)


def _fields(response: InferResponse, words: Mapping[str, str] = _NO_WORDS) -> dict[str, Any]:
    """Args: words: of the whole answer; those of them that its headers could not have."""
    fields: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        fields[_ID] = response.id
    for tensor in response.outputs:
        if tensor.name == TEXT_OUTPUT:
            fields[TEXT_OUTPUT] = split_bytes(tensor.raw)[0].decode()
        elif tensor.name == OUTPUT_IDS:
            fields[OUTPUT_IDS] = ids_of(tensor)
    late = {key: words[key] for key in (RESUMED_KEY, CUT_KEY) if key in words}
    return {**fields, **response.parameters, **late}


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(fields) + b"\n\n"

"""OIP v2 over HTTP in front of any `ModelHost`: JSON, binary tensors, and the parts of Triton's API in use.

Unmodified clients need the following:
- nothing is dispatched on Content-Type: tritonclient sends none at all, its aio flavour octet-stream even for JSON;
- errors are `{"error": "…", "code": "…"}` with a Content-Type of exactly `application/json`: with a charset behind it
  kserve loses the message. Also where aiohttp itself answers (404, 405, 413), through `error_middleware`;
- health answers have a JSON body, because kserve parses it;
- request bodies may be gzip or deflate, and the limit counts what comes out: a small bomb is a 413 like a large body;
- answers are never br or zstd, and gzip only for a caller that asks for nothing else (`Accept-Encoding: gzip`): HTTP
  libraries announce a list of their own accord, and embeddings do not compress.

Inference is asked for under a handful of plain paths, and finding its route takes aiohttp longer than the gateway needs
to place it. `OipRoutes.ahead_of` therefore stands before aiohttp's dispatch and takes the requests whose path says
plainly what they are; any other (escapes, queries, `Expect`) goes the whole way, to the same handler.

When the caller leaves, `host.infer` must be cancelled. aiohttp does that only under `AppRunner(handler_cancellation=
True)`, which is for the owner of the application to set; nothing here catches the cancellation.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from tidegate import clock
from tidegate.generate.text.text_side import TextSides
from tidegate.models.manifest import Manifest
from tidegate.oip import body_budget, metadata
from tidegate.oip.body_budget import BodyLimits, BodyMemory, BodyReservation
from tidegate.oip.call import call_of, kept_headers
from tidegate.oip.check import quoted_input
from tidegate.oip.classify import wanted_classes, with_classes, without_classes, work_bytes
from tidegate.oip.content_limits import DEFAULT, ContentLimits
from tidegate.oip.generation.oip_generation import OipGeneration
from tidegate.oip.guard import Guard, OpenGuard
from tidegate.oip.host import ModelHost
from tidegate.oip.http.body import read_body
from tidegate.oip.http.codec import (
    HEADER_LENGTH_KEY,
    BinaryOutputs,
    Decoded,
    Encoded,
    check_answerable,
    decode_raw_request,
    decode_request,
    encode_response,
    header_length_of,
)
from tidegate.oip.http.generate import GenerateRoutes
from tidegate.oip.http.guard import credentials_over_http
from tidegate.oip.http.json_bounds import check_json
from tidegate.oip.http.responses import (
    JSON_TYPE,
    RefusalObserver,
    failure_response,
    json_response,
)
from tidegate.oip.offload import LARGE_BYTES, CodecThreads
from tidegate.oip.orca import LOAD_FORMAT_KEY, LOAD_KEY, load_text
from tidegate.oip.reply import reply_parameters
from tidegate.oip.repository.model_control import NO_OVERRIDES, ControlAccess, FixedModels
from tidegate.oip.unknown_headers import warn_of_unknown
from tidegate.outcome import InternalError, InvalidRequest, NotSupported, ServeError, TooLarge
from tidegate.trace_context import PARENT_KEY
from tidegate.types import Call, InferResponse, Reply

PROTOCOL: Final = "oip-http"
BINARY_TYPE: Final = "application/octet-stream"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Guarded = Callable[[web.Request, ModelHost], Awaitable[web.StreamResponse]]  # is given the host, and has no other
Entrance = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_QUESTION_BYTES: Final = 2**20  # of a body that is no inference
_SMALL_BYTES: Final = 64 * 1024  # compressing more than this is left to a thread
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}  # zlib's window bits for the two containers

_UNSUPPORTED: Final = (
    "/v2/trace/setting", "/v2/models/{model}/trace/setting", "/v2/logging",
    *[f"/v2/{kind}sharedmemory/{rest}" for kind in ("system", "cuda") for rest in (
        "status", "unregister", *[f"region/{{region}}/{verb}" for verb in ("status", "register", "unregister")],
    )],
)  # fmt: skip

_plain_infer: Final = re.compile(r"/v2/models/([\w.-]+)(?:/versions/([\w.-]+))?/infer", re.ASCII).fullmatch


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error of the application in OIP's form: the handlers raise, and aiohttp answers 404 and 405 itself."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _http_error(request, error)
    except Exception as error:
        return failure_response(request, error)


class OipRoutes:
    """The routes of OIP v2 and of Triton's extensions; the application needs `error_middleware` for them."""

    def __init__(
        self,
        host: ModelHost,
        *,
        max_body_bytes: int,
        on_refused: RefusalObserver | None = None,
        guard: Guard | None = None,
        control: ControlAccess | None = None,
        limits: ContentLimits = DEFAULT,
        body_limits: BodyLimits = body_budget.DEFAULT,
        held: BodyMemory | None = None,
        texts: TextSides | None = None,
    ) -> None:
        """Args:
        host: answers the calls.
        texts: the text sides of generating models; None: such models take and give token ids.
        max_body_bytes: of a request, after decompression.
        control: who may load and unload models, and how; None: the models are fixed.
        limits: bounds on the content of a request.
        body_limits: how a body may come.
        held: the memory budget for large bodies, shared with other protocols.
        on_refused: called with (protocol, model name, error) for each inference refused here, before the host saw it.
        guard: authorizes requests other than health; None: every request is allowed.
        """
        self._open = host  # for health, which needs no credentials
        self._guard = guard or OpenGuard(host)
        self._control = control or FixedModels(self._guard)
        self._max_body_bytes = max_body_bytes
        self._limits = limits
        self._body_limits = body_limits
        self._held = held or BodyMemory(body_limits.max_held_bytes)
        self._on_refused = on_refused
        self._aside = CodecThreads()
        self._texts = texts
        self._generate = GenerateRoutes(
            self._guard,
            texts,
            max_body_bytes=max_body_bytes,
            limits=limits,
            body_limits=body_limits,
            held=self._held,
            aside=self._aside,
            on_refused=on_refused,
        )

    def __repr__(self) -> str:
        return f"<OipRoutes {self._open.server_name} {len(self._open.manifests())} models>"

    def table(self) -> list[web.RouteDef]:
        model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        return [
            web.post(f"{model}/infer", self.infer),
            web.post(f"{version}/infer", self.infer),
            web.get("/v2/health/live", self.live),
            web.get("/v2/health/ready", self.ready),
            self._get("/v2", server_metadata),
            self._get("/v2/", server_metadata),
            self._get("/v2/models/stats", statistics),
            *[route for prefix in (model, version) for route in self._model_table(prefix)],
            self._post("/v2/repository/index", self.index),
            web.post("/v2/repository/models/{model}/load", self.load),
            web.post("/v2/repository/models/{model}/unload", self.unload),
            *[route for path in _UNSUPPORTED for route in (self._get(path, _refuse), self._post(path, _refuse))],
        ]

    def _model_table(self, prefix: str) -> list[web.RouteDef]:
        return [
            self._get(prefix, model_metadata),
            self._get(f"{prefix}/ready", model_ready),
            self._get(f"{prefix}/config", model_config),
            self._get(f"{prefix}/stats", statistics),
            web.post(f"{prefix}/generate", self._generate.whole),
            web.post(f"{prefix}/generate_stream", self._generate.stream),
        ]

    def _get(self, path: str, handler: Guarded) -> web.RouteDef:
        return web.get(path, self._guarded(handler))

    def _post(self, path: str, handler: Guarded) -> web.RouteDef:
        return web.post(path, self._guarded(handler))

    def _guarded(self, handler: Guarded) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            return await handler(request, await self._guard.admit(credentials_over_http(request, PROTOCOL)))

        return guarded

    def ahead_of(self, dispatch: Entrance) -> Entrance:
        """What takes plain inference requests itself and leaves all others to aiohttp's own dispatch."""

        async def entrance(request: web.BaseRequest) -> web.StreamResponse:
            found = _plain_infer(request.raw_path)
            if found is None or request.method != "POST" or "Expect" in request.headers:
                return await dispatch(request)
            try:
                return await self._infer(request, found[1], found[2] or "")
            except Exception as error:
                return failure_response(request, error)

        return entrance

    # Inference

    async def infer(self, request: web.Request) -> web.Response:
        return await self._infer(request, *_address(request))

    async def _infer(self, request: web.BaseRequest, name: str, version: str) -> web.Response:
        arrived_at = clock.now()
        with self._held.share() as share:
            try:
                host = await self._guard.admit(credentials_over_http(request, PROTOCOL))
                call, binary, wanted, manifest = await self._call(request, share, host, name, version, arrived_at)
                generation = None
                if manifest.generative is not None:
                    generation = await OipGeneration.of(host, call, manifest, self._texts, self._limits, whole=True)
            except ServeError as error:
                if self._on_refused is not None:
                    self._on_refused(PROTOCOL, name, error)
                raise
            reply = await (host.infer(call) if generation is None else generation.whole())
            words = reply_parameters(reply)
            warn_of_unknown(words, call.headers)
            if (size_bytes := work_bytes(reply.response, wanted)) <= LARGE_BYTES:
                encoded = _encoded(reply.response, wanted, binary, words)
            else:
                encoded = await self._aside.run(size_bytes, lambda: _encoded(reply.response, wanted, binary, words))
            answer = _answer(encoded, _answer_headers(call, reply, words))
            asked = request.headers.get("Accept-Encoding")
            if asked in _WINDOW_BITS:
                await _compress(answer, encoded.body, asked)
            return answer

    async def _call(
        self,
        request: web.BaseRequest,
        share: BodyReservation,
        host: ModelHost,
        name: str,
        version: str,
        arrived_at: float,
    ) -> tuple[Call, BinaryOutputs, dict[str, int], Manifest]:
        body = await read_body(request, self._max_body_bytes, limits=self._body_limits, share=share)
        manifest = host.manifest(name, version)
        if len(body) <= LARGE_BYTES:
            decoded = self._decode(request, body, manifest, version)
        else:
            decoded = await self._aside.run(len(body), lambda: self._decode(request, body, manifest, version))
        wanted = wanted_classes(decoded.request) if decoded.request.outputs else {}
        call = call_of(
            without_classes(decoded.request) if wanted else decoded.request,
            manifest,
            protocol=PROTOCOL,
            headers=kept_headers(request.headers.items()),
            arrived_at=arrived_at,
        )
        check_answerable(decoded, manifest, wanted)
        return call, decoded.binary, wanted, manifest

    def _decode(self, request: web.BaseRequest, body: bytes, manifest: Manifest, version: str) -> Decoded:
        header_length = header_length_of(request.headers.get(HEADER_LENGTH_KEY), len(body))
        if header_length == 0:
            return decode_raw_request(body, manifest, self._limits)
        return decode_request(
            body, header_length=header_length, model_name=manifest.name, model_version=version, limits=self._limits
        )

    # Everything else

    async def live(self, _: web.Request) -> web.Response:
        return json_response({"live": True})

    async def ready(self, _: web.Request) -> web.Response:
        ready = self._open.ready()
        return json_response({"live": True, "ready": ready}, status=200 if ready else 503)

    async def index(self, request: web.Request, host: ModelHost) -> web.Response:
        asked = await self._json_object(request)
        statuses = await self._control.statuses(host)
        return json_response(metadata.repository_index(host, statuses, only_ready=asked.get("ready") is True))

    async def _json_object(self, request: web.Request) -> dict[str, Any]:
        """A body that may be empty or a JSON object."""
        body = await read_body(request, min(self._max_body_bytes, _QUESTION_BYTES), limits=self._body_limits)
        check_json(body, self._limits)
        try:
            return msgspec.json.decode(body, type=dict[str, Any]) if body.strip() else {}
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidRequest("the body is no JSON object") from error

    async def load(self, request: web.Request) -> web.Response:
        control = await self._control.admit(credentials_over_http(request, PROTOCOL))
        if (await self._json_object(request)).get("parameters"):
            raise NotSupported(NO_OVERRIDES)
        await control.load(request.match_info["model"])
        return web.Response()

    async def unload(self, request: web.Request) -> web.Response:
        """Its parameters, as of Triton's dependents, change nothing here."""
        control = await self._control.admit(credentials_over_http(request, PROTOCOL))
        await self._json_object(request)
        await control.unload(request.match_info["model"])
        return web.Response()


async def server_metadata(_: web.Request, host: ModelHost) -> web.Response:
    return json_response(metadata.server_metadata(host))


async def model_ready(request: web.Request, host: ModelHost) -> web.Response:
    name, version = _address(request)
    manifest = host.manifest(name, version)
    ready = host.model_ready(name, version)
    return json_response({"name": manifest.name, "ready": ready}, status=200 if ready else 503)


async def model_metadata(request: web.Request, host: ModelHost) -> web.Response:
    name, version = _address(request)
    manifest = host.manifest(name, version)
    return json_response(metadata.model_metadata(manifest, metadata.versions_of(host, name)))


async def model_config(request: web.Request, host: ModelHost) -> web.Response:
    return json_response(metadata.model_config(host.manifest(*_address(request))))


async def statistics(request: web.Request, host: ModelHost) -> web.Response:
    return json_response(metadata.model_statistics(host.statistics(*_address(request))))


async def _refuse(request: web.Request, _: ModelHost) -> web.StreamResponse:
    raise NotSupported(f"{request.method} {quoted_input(request.path)} is not supported")


def _address(request: web.Request) -> tuple[str, str]:
    return request.match_info.get("model", ""), request.match_info.get("version", "")


def _answer_headers(call: Call, reply: Reply, headers: dict[str, str]) -> dict[str, str]:
    """`headers`, which start as `reply_parameters`, with the entries that are for headers only."""
    if reply.load is not None:
        headers[LOAD_KEY] = load_text(reply.load, call.headers.get(LOAD_FORMAT_KEY, ""))
    if PARENT_KEY in call.headers and not reply.traceparent:
        headers[PARENT_KEY] = call.headers[PARENT_KEY]
    return headers


def _encoded(
    response: InferResponse, wanted: Mapping[str, int], binary: BinaryOutputs, words: Mapping[str, str]
) -> Encoded:
    return encode_response(with_classes(response, wanted) if wanted else response, binary, words)


def _answer(encoded: Encoded, headers: dict[str, str]) -> web.Response:
    if encoded.header_length is None:
        headers["Content-Type"] = JSON_TYPE
    else:
        headers["Content-Type"] = BINARY_TYPE
        headers[HEADER_LENGTH_KEY] = str(encoded.header_length)
    return web.Response(body=encoded.body, headers=headers)


async def _compress(answer: web.Response, body: bytes, encoding: str) -> None:
    small = len(body) <= _SMALL_BYTES
    answer.body = _deflated(body, encoding) if small else await asyncio.to_thread(_deflated, body, encoding)
    answer.headers["Content-Encoding"] = encoding


def _deflated(body: bytes, encoding: str) -> bytes:
    squeezer = zlib.compressobj(1, wbits=_WINDOW_BITS[encoding])
    return squeezer.compress(body) + squeezer.flush()


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals, in words that name the route."""
    route = f"{request.method} {quoted_input(request.path)}"
    words = {
        404: f"there is no {route}",
        405: f"{route} is not allowed; allowed: {error.headers.get('Allow', 'nothing')}",
        413: "the body is too large",
    }
    code = {404: "not_found", 405: "method_not_allowed", 413: TooLarge.code}
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    body = {
        "error": words.get(error.status, error.reason),
        "code": code.get(error.status, InvalidRequest.code if error.status < 500 else InternalError.code),
    }
    return json_response(body, status=error.status, headers=headers)

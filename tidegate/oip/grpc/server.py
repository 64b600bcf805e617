"""OIP v2 over gRPC in front of any `ModelHost`, with the parts of Triton's superset that clients use.

The service is registered by hand under `/inference.GRPCInferenceService/…`, and messages are parsed here and not by
grpc: what is no message is then the caller's fault with a sentence, where grpc would answer INTERNAL.

The path of one inference: bytes → message → `InferRequest` (raw tensors, nothing decoded) → checked `Call` → host →
message → bytes. The deadline of the gRPC call counts as a budget. When the caller leaves or its deadline passes, grpc
cancels the handler, which is inside `host.infer` then: cancelling goes all the way down, and is never caught here.

Every refusal carries its code in trailing metadata; every answer says there and in its parameters where it was made.

A stream (`ModelStreamInfer`) answers in the order of its requests and works on several of them at a time; an error is
an `error_message` in its place, or, for callers that set `triton_grpc_error: true`, ends the stream with its status.
The answers of generating models are decoupled, as in Triton: they come a response at a time as their tokens do, each
with its request's id, and the last has `triton_final_response`.
While the server drains (`drain`), a stream answers what it has read, and ends with a refusal that names a time to
retry.

Models are loaded and unloaded by the process's model control (`tidegate/oip/repository/model_control.py`); loading with
overrides is not supported, nor are tracing, log settings and shared memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import grpc
import structlog
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tidegate import clock
from tidegate.generate.text.text_side import TextSides
from tidegate.oip import body_budget
from tidegate.oip.body_budget import BodyMemory
from tidegate.oip.call import call_of, kept_headers
from tidegate.oip.classify import wanted_classes, with_classes, without_classes, work_bytes
from tidegate.oip.content_limits import DEFAULT, ContentLimits
from tidegate.oip.generation.oip_generation import OipGeneration
from tidegate.oip.grpc.codec import message_from_response, parse_request, request_from_message
from tidegate.oip.grpc.guard import credentials_over_grpc
from tidegate.oip.grpc.health import HealthService
from tidegate.oip.grpc.methods import ASKED, CONTROLLED, HEALTH, Ask, Control
from tidegate.oip.grpc.reflection import SERVICE, inference_pool
from tidegate.oip.grpc.stream_headers import send_headers
from tidegate.oip.grpc.stream_requests import read_until
from tidegate.oip.guard import Guard, OpenGuard
from tidegate.oip.host import ModelHost
from tidegate.oip.metadata import repository_index
from tidegate.oip.offload import CodecThreads
from tidegate.oip.orca import LOAD_FORMAT_KEY, LOAD_KEY, load_text
from tidegate.oip.reply import reply_parameters
from tidegate.oip.repository.model_control import ControlAccess, FixedModels
from tidegate.oip.status import CODE_KEY, TICKET_KEY, error_code, error_metadata, grpc_status, message_of
from tidegate.oip.unknown_headers import warn_of_unknown
from tidegate.outcome import (
    Deferred,
    InternalError,
    InvalidRequest,
    NotSupported,
    ServeError,
    ShuttingDown,
    TooLarge,
    Unauthenticated,
)
from tidegate.rpc import oip_pb2
from tidegate.trace_context import PARENT_KEY
from tidegate.types import Call, InferRequest, Reply

PROTOCOL: Final = "oip-grpc"
STREAM_WINDOW: Final = 64  # requests of one stream that may be worked on at a time

RefusalObserver = Callable[[str, str, ServeError], None]
Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[bytes, Context], Awaitable[bytes]]
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]  # as `abort` takes it

SHARED_AGE_S: Final = 20.0  # gRPC varies it by a tenth

_MAX_PENDING: Final = 100_000  # calls that grpc has and Python does not yet

_MAX_QUESTION_BYTES: Final = 64 * 1024  # of anything but inference: names, mostly

_UNSUPPORTED: Final = (
    "TraceSetting", "LogSettings",
    "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
)  # fmt: skip
_STATUS_CODES: Final = {code.name: code for code in grpc.StatusCode}

_log = structlog.get_logger(__name__)


def server_options(max_message_bytes: int, *, shares_port: bool = False) -> list[tuple[str, Any]]:
    """Options for `grpc.aio.server`: the size of a message, and what a long-lived connection needs."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # With it two processes on one port share its connections, meant or not, and the second does not fail to start.
        ("grpc.so_reuseport", int(shares_port)),
        # Connections to shared ports are opened anew now and then, so that they spread over processes that came later,
        # and so that a process which accepts no more is left by all of them. Calls on them are answered.
        *([("grpc.max_connection_age_ms", int(SHARED_AGE_S * 1e3))] if shares_port else []),
        # A gateway and kserve ping idle connections; the default of five minutes would send them away for it.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        # grpc cancels, at random from 1000 on, calls that Python has not taken up yet: a burst would see CANCELLED,
        # which says nothing. Admission refuses with a reason and a time to retry.
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
    ]


class OipService:
    """The methods of the service over one host.

    Args:
        max_message_bytes: of a request and of an answer.
        on_refused: called with (protocol, model name, error) for each inference refused here, before the host saw it.
        guard: authorizes calls other than health and reflection; None: every call is allowed.
        limits: bounds on the content of one request.
        control: who may load and unload models, and how; None: the models are fixed.
        held: the memory budget for large messages, shared with other protocols.
        texts: the text sides of generating models; None: such models take and give token ids.
    """

    def __init__(
        self,
        host: ModelHost,
        *,
        max_message_bytes: int,
        on_refused: RefusalObserver | None = None,
        guard: Guard | None = None,
        control: ControlAccess | None = None,
        limits: ContentLimits = DEFAULT,
        held: BodyMemory | None = None,
        texts: TextSides | None = None,
    ) -> None:
        self._limits = limits
        self._texts = texts
        self._held = held or BodyMemory(body_budget.DEFAULT.max_held_bytes)
        self._open = host  # for health, which needs no credentials
        self._guard = guard or OpenGuard(host)
        self._control = control or FixedModels(self._guard)
        self._max_message_bytes = max_message_bytes
        self._on_refused = on_refused
        self._aside = CodecThreads()
        self._draining = asyncio.Event()
        self._under_way = 0

    @property
    def under_way(self) -> int:
        """The number of inference calls and streams whose last byte has not been sent."""
        return self._under_way

    def drain(self) -> None:
        """End the streams, of inference once what they have read is answered, and tell the watchers of health."""
        self._draining.set()

    def __repr__(self) -> str:
        return f"<OipService {self._open.server_name} {len(self._open.manifests())} models>"

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it, with gRPC health and reflection, on a server made with `server_options` and not yet started."""
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self.handlers()),))
        health_pb2_grpc.add_HealthServicer_to_server(HealthService(self._open, (SERVICE,), self._draining), server)
        names = (SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, pool=inference_pool(self.signatures()))

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        """The handler of each method. No (de)serializers: bytes come in and go out."""
        unary = {name: self._answer(name, *entry) for name, entry in ASKED.items()}
        unary |= {name: self._controlling(*entry) for name, entry in CONTROLLED.items()}
        unary |= {name: self._refuse_unsupported(name) for name in _UNSUPPORTED}
        unary["RepositoryIndex"] = self._repository_index
        unary["ModelInfer"] = self._model_infer
        handlers = {name: grpc.unary_unary_rpc_method_handler(_refusing(method)) for name, method in unary.items()}
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._model_stream_infer)
        return handlers

    def signatures(self) -> list[tuple[str, str, str, bool]]:
        """Name, request, response and streaming of each method, for reflection."""
        asked = [
            (name, request.DESCRIPTOR.name, response.DESCRIPTOR.name, False)
            for name, (request, response, _) in (*ASKED.items(), *CONTROLLED.items())
        ]
        return [
            *asked,
            ("RepositoryIndex", "RepositoryIndexRequest", "RepositoryIndexResponse", False),
            ("ModelInfer", "ModelInferRequest", "ModelInferResponse", False),
            ("ModelStreamInfer", "ModelInferRequest", "ModelStreamInferResponse", True),
        ]

    # Inference

    def _count(self, context: Context) -> None:
        self._under_way += 1
        # After the last byte of the answer. The stubs take the type of a function for a class.
        context.add_done_callback(self._uncount)  # type: ignore[arg-type]

    def _uncount(self, _context: Any) -> None:
        self._under_way -= 1

    async def _model_infer(self, raw: bytes, context: Context) -> bytes:
        self._count(context)
        with self._held.share() as share:
            share.grow(len(raw))
            return await self._infer_within(raw, context)

    async def _infer_within(self, raw: bytes, context: Context) -> bytes:
        call, wanted, host, generation = await self._call(raw, context, clock.now(), whole=True)
        reply = await (host.infer(call) if generation is None else generation.whole())
        words = reply_parameters(reply)
        warn_of_unknown(words, call.headers)
        answer = await self._aside.run(
            work_bytes(reply.response, wanted), lambda: self._message(reply, wanted, words).SerializeToString()
        )
        self._check_length(answer)
        context.set_trailing_metadata(_trailers(call, reply, words))
        return answer

    def _check_length(self, answer: bytes) -> None:
        """Raises TooLarge: grpc would break the call off, or with it all of a stream's."""
        if len(answer) > self._max_message_bytes:
            raise TooLarge(f"the answer has {len(answer)} bytes; at most {self._max_message_bytes} can be sent")

    async def _call(
        self, raw: bytes, context: Context, arrived_at: float, *, whole: bool
    ) -> tuple[Call, dict[str, int], ModelHost, OipGeneration | None]:
        """Args: whole: of a generation, its caller wants it in one answer."""
        message = oip_pb2.ModelInferRequest()
        said = _text_metadata(context)
        try:
            host = await self._guard.admit(credentials_over_grpc(said, context, PROTOCOL))
            if len(raw) > self._max_message_bytes:
                raise TooLarge(f"the message has {len(raw)} bytes; at most {self._max_message_bytes} may come")
            request = await self._aside.run(len(raw), lambda: _parsed(message, raw, self._limits))
            manifest = host.manifest(request.model_name, request.model_version)
            wanted = wanted_classes(request) if request.outputs else {}
            call = call_of(
                without_classes(request) if wanted else request,
                manifest,
                protocol=PROTOCOL,
                headers=kept_headers(said),
                arrived_at=arrived_at,
                remaining_s=context.time_remaining(),
            )
            generation = None
            if manifest.generative is not None:
                generation = await OipGeneration.of(host, call, manifest, self._texts, self._limits, whole=whole)
        except ServeError as error:
            if self._on_refused is not None:
                self._on_refused(PROTOCOL, message.model_name, error)
            raise
        return call, wanted, host, generation

    def _message(self, reply: Reply, wanted: Mapping[str, int], words: Mapping[str, str]) -> oip_pb2.ModelInferResponse:
        response = with_classes(reply.response, wanted) if wanted else reply.response
        return message_from_response(response, words)

    async def _model_stream_infer(self, requests: AsyncIterator[bytes], context: Context) -> None:
        self._count(context)
        said = _text_metadata(context)
        strict = dict(said).get("triton_grpc_error") == "true"
        presented = credentials_over_grpc(said, context, PROTOCOL)
        try:
            await self._guard.let_in(presented)
        except ServeError as error:
            status: Status | None = _status_of(error)
        else:  # each request of the stream is authorized again, and one that is silent is followed
            with self._guard.follow(presented) as lapse:
                status = await self._answer_stream(requests, context, lapse, strict=strict)
        if status is not None:
            await context.abort(*status)

    async def _answer_stream(
        self, requests: AsyncIterator[bytes], context: Context, lapse: Awaitable[ServeError] | None, *, strict: bool
    ) -> Status | None:
        """What ended the stream, if it was not its caller. `lapse`: of its credential."""
        await send_headers(context)
        window: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(STREAM_WINDOW)
        writer = _StreamWriter(context)
        status: Status | None = None
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(_write_in_order(window, writer), name="oip-stream-writer")
                if lapse is not None:
                    lapsing = group.create_task(_raise(lapse), name="oip-stream-credential")
                    writing.add_done_callback(lambda _: lapsing.cancel())

                async def take(raw: bytes) -> None:
                    answer = self._stream_answer(raw, context, writer, strict=strict)
                    try:
                        task = group.create_task(answer, name="oip-stream-infer")
                    except RuntimeError:  # an answer before it has ended the stream, and the group takes no more
                        answer.close()
                        return
                    await window.put(task)

                await read_until(self._draining, requests, take)
                await window.put(None)
                if self._draining.is_set():
                    status = _status_of(ShuttingDown.of(self._open.server_name))
        except* ServeError as failed:
            status = _status_of(_first(failed))
        finally:
            # An error's traceback holds this frame, and these hold the error: its request would stay until the next
            # full collection, with bodies of 60 MiB far too long.
            del writing, take
        return status

    async def _stream_answer(self, raw: bytes, context: Context, writer: _StreamWriter, *, strict: bool) -> bytes:
        """One answer of a stream, or b"" for one that has been written.

        Raises:
            ServeError: it ends the stream, if `strict` or if its caller lost its rights.
        """
        try:
            with self._held.share() as share:
                share.grow(len(raw))
                call, wanted, host, generation = await self._call(raw, context, clock.now(), whole=False)
                if generation is not None:
                    await _write_generation(generation, call, writer)
                    return b""
                reply = await host.infer(call)
            size_bytes, words = work_bytes(reply.response, wanted), reply_parameters(reply)
            warn_of_unknown(words, call.headers)
            answer = await self._aside.run(
                size_bytes, lambda: _stream_message(self._message(reply, wanted, words), final=True)
            )
            self._check_length(answer)
        except Exception as error:
            known = _known(error)
            if strict or isinstance(known, Unauthenticated):
                raise known from None
            return _stream_error(raw, known.without_frames()).SerializeToString()
        return answer

    # Everything else

    def _answer(
        self, name: str, request: type[Message], response: type[Message], ask: Ask
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """A method that is answered from a dict with the fields of its response message."""

        async def method(raw: bytes, context: Context) -> bytes:
            host = self._open if name in HEALTH else await self._admitted(context)
            answer = ask(_parse(request(), raw), host)
            return ParseDict(dict(answer), response(), ignore_unknown_fields=True).SerializeToString()

        return method

    async def _repository_index(self, raw: bytes, context: Context) -> bytes:
        host = await self._admitted(context)
        asked = oip_pb2.RepositoryIndexRequest()
        _parse(asked, raw)
        models = repository_index(host, await self._control.statuses(host), only_ready=asked.ready)
        return ParseDict({"models": models}, oip_pb2.RepositoryIndexResponse()).SerializeToString()

    def _controlling(
        self, request: type[Message], response: type[Message], change: Control
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """A method that changes which models there are."""

        async def method(raw: bytes, context: Context) -> bytes:
            control = await self._control.admit(credentials_over_grpc(_text_metadata(context), context, PROTOCOL))
            await change(_parse(request(), raw), control)
            return response().SerializeToString()

        return method

    async def _admitted(self, context: Context) -> ModelHost:
        return await self._guard.admit(credentials_over_grpc(_text_metadata(context), context, PROTOCOL))

    def _refuse_unsupported(self, name: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def method(_raw: bytes, context: Context) -> bytes:
            await self._admitted(context)
            raise NotSupported(f"{name} is not supported")

        return method


class _StreamWriter:
    """Writes to one stream, for several tasks: grpc takes one message at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._turn = asyncio.Lock()

    async def write(self, message: bytes) -> None:
        async with self._turn:
            await self._context.write(message)


async def _write_in_order(window: asyncio.Queue[asyncio.Task[bytes] | None], writer: _StreamWriter) -> None:
    while (task := await window.get()) is not None:
        if message := await task:
            await writer.write(message)


async def _write_generation(generation: OipGeneration, call: Call, writer: _StreamWriter) -> None:
    """One response for all that has come since the last one, and one that ends them."""
    async with generation.answer as answer:
        while pieces := await answer.take():
            await writer.write(_stream_message(message_from_response(generation.response(pieces)), final=False))
        words = answer.words
        warn_of_unknown(words, call.headers)
        last = message_from_response(generation.response([], answer.usage), words)
        await writer.write(_stream_message(last, final=True))


def _stream_message(response: oip_pb2.ModelInferResponse, *, final: bool) -> bytes:
    response.parameters["triton_final_response"].bool_param = final
    return oip_pb2.ModelStreamInferResponse(infer_response=response).SerializeToString()


async def _raise(lapse: Awaitable[ServeError]) -> None:
    raise await lapse


def _refusing(work: Method) -> Method:
    """`work` with whatever it raises as the status of its call.

    grpc keeps the exception with which `abort` ends a call inside that call, and the exception's traceback keeps every
    frame on its way, so each refused call is garbage in a cycle. It must hold no request: 60 MiB bodies would pile up
    until the collector comes by. Hence the coroutine that is ended first, and a status that is nothing but words.
    """

    async def method(raw: bytes, context: Context) -> bytes:
        answering = work(raw, context)
        del raw
        try:
            return await answering
        except Exception as error:
            status = _status_of(error)
        await context.abort(*status)
        raise AssertionError("abort returned")  # grpc's abort always raises, which its types do not say

    return method


def _status_of(error: Exception) -> Status:
    """The status of `error`, as `abort` takes it; one that is no ServeError is our defect and logged in full."""
    known = _known(error)
    return _STATUS_CODES[grpc_status(known)], message_of(known), error_metadata(known)


def _known(error: Exception) -> ServeError:
    if isinstance(error, ServeError):
        return error
    _log.exception("a request failed by a defect", exc_info=error)
    return InternalError(message_of(error))


def _first(failed: BaseExceptionGroup[ServeError]) -> ServeError:
    """The first error, without the frames it came through: the group that holds it is garbage in a cycle."""
    leaf: BaseException = failed
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    assert isinstance(leaf, ServeError)
    return leaf.without_frames()


def _stream_error(raw: bytes, error: ServeError) -> oip_pb2.ModelStreamInferResponse:
    """An error in an answer's place, with the id of its request so that a client can tell which one failed."""
    request = oip_pb2.ModelInferRequest()
    try:
        parse_request(request, raw)
    except ServeError:
        request.Clear()
    answer = oip_pb2.ModelStreamInferResponse(error_message=message_of(error))
    answer.infer_response.id = request.id
    answer.infer_response.model_name = request.model_name
    answer.infer_response.parameters[CODE_KEY].string_param = error_code(error)
    if isinstance(error, Deferred):
        answer.infer_response.parameters[TICKET_KEY].string_param = error.ticket
    answer.infer_response.parameters["triton_final_response"].bool_param = True
    return answer


def _parsed(message: oip_pb2.ModelInferRequest, raw: bytes, limits: ContentLimits) -> InferRequest:
    return request_from_message(parse_request(message, raw, limits), limits)


def _parse(message: Message, raw: bytes) -> Message:
    if len(raw) > _MAX_QUESTION_BYTES:
        raise TooLarge(f"a {message.DESCRIPTOR.name} of {len(raw)} bytes; at most {_MAX_QUESTION_BYTES} may come")
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"the bytes that came are no {message.DESCRIPTOR.name}") from error
    return message


def _text_metadata(context: Context) -> list[tuple[str, str]]:
    return [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]


def _trailers(call: Call, reply: Reply, words: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    trailers = tuple(words.items())
    if reply.load is not None:
        trailers += ((LOAD_KEY, load_text(reply.load, call.headers.get(LOAD_FORMAT_KEY, ""))),)
    if PARENT_KEY in call.headers and not reply.traceparent:
        trailers += ((PARENT_KEY, call.headers[PARENT_KEY]),)
    return trailers

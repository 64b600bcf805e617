"""A target that speaks plain OIP over gRPC: Triton, KServe, OpenVINO Model Server, or one of ours without a link.

One unary call a request under the literal path of the service, with the budget as gRPC's own deadline. A foreign
server is sent what OIP and Triton define and nothing else; one of ours also gets the demanded variant, and its
trailers are read for stage times and load.

A foreign server has no hello, so a probe stands in for it: `ServerReady` every second. The first that succeeds reports
`LinkUp` with the models that the server describes, each gives a round trip, the first that fails reports `LinkDown`.
Requests are tried regardless: what a request meets is better evidence than a probe, and the breaker counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from msgspec.structs import replace

from gateway.core.fleet.link_events import LinkDown, LinkEvent, LinkRtt, LinkUp
from gateway.targets.foreign_model import manifest_from, offer_of
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.link.client import MAX_MESSAGE_BYTES
from tidegate.models.manifest import Manifest
from tidegate.oip.call import GATEWAY_HOP, HOP_KEY
from tidegate.oip.grpc.codec import message_from_request
from tidegate.oip.grpc.oip_messages import response_from_bytes
from tidegate.oip.orca import LOAD_KEY, load_from_text
from tidegate.oip.reply import TIMING_KEY
from tidegate.oip.request_constraints import VARIANT_KEY
from tidegate.oip.status import CODE_KEY, error_from_grpc
from tidegate.outcome import BadAnswer, DeadlineExceeded, NotSupported, ServeError, TooLarge, Unreachable
from tidegate.rpc import oip_pb2
from tidegate.runtime.owned_task import OwnedTask
from tidegate.security.tls import Dialler, PlainDialler, explain_dial_error
from tidegate.token_sink import TokenObjectives, TokenSink
from tidegate.trace_context import PARENT_KEY, STATE_KEY
from tidegate.types import Accepted, InferRequest, Reply

log = structlog.get_logger(__name__)

_SERVICE: Final = "/inference.GRPCInferenceService/"
_PROBE_TIMEOUT_S: Final = 2.0
_STAGES: Final = ("queue", "compute")
_LONGEST_S: Final = 1e6  # a claim beyond is none
_NO_STAGES: Final[Mapping[str, float]] = MappingProxyType({})

Raw = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """A half-open connection is found in 15 s, a server that is back in 5 s; retries are not for gRPC to do."""
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 250),
        ("grpc.min_reconnect_backoff_ms", 3_000),  # what one attempt may take, whatever its name says
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


class UnaryTarget:
    """A `Target`. `async with` opens the channel, and probes the server if a listener is given.

    Args:
        foreign: not one of ours: send and expect only what the protocol defines.
        models: what the server is asked to describe when it comes up; nothing else of it is offered.
        on_event: None for no probes.
        dialler: opens the channel, and checks the server's identity; None: without encryption.
    """

    def __init__(
        self,
        id: str,
        address: str,
        *,
        foreign: bool,
        models: Sequence[str] = (),
        on_event: Callable[[LinkEvent], None] | None = None,
        probe_interval_s: float = 1.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        dialler: Dialler | None = None,
    ) -> None:
        self._id = id
        self._address = address
        self._foreign = foreign
        self._models = tuple(models)
        self._probe_interval_s = probe_interval_s
        self._options = channel_options(max_message_bytes)
        self._dialler = dialler or PlainDialler()
        self._opened_as: object = None  # the dialler's version then
        self._channel: grpc.aio.Channel | None = None
        self._retired: grpc.aio.Channel | None = None  # calls that were under way at a renewal end on it
        self._infer: Raw | None = None
        self._probing: OwnedTask | None = None
        if on_event is not None:
            self._probing = OwnedTask(partial(self._probe, on_event), name=f"probe of {id}")
        self._up: bool | None = None  # None: no probe has ended yet
        self._reason = "not probed yet"

    def __repr__(self) -> str:
        kind = "foreign" if self._foreign else "ours"
        return f"<UnaryTarget {self._id} at {self._address} ({kind}) {'up' if self._up else self._reason}>"

    @property
    def id(self) -> str:
        return self._id

    @property
    def address(self) -> str:
        return self._address

    @property
    def connected(self) -> bool:
        """Whether the last probe succeeded; True before the first, since a request may be tried."""
        return self._up is not False

    async def __aenter__(self) -> UnaryTarget:
        self._open()
        if self._probing is not None:
            self._probing.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._probing is not None:
            await self._probing.aclose()
        for channel in (self._retired, self._channel):
            if channel is not None:
                await channel.close(None)

    async def infer(
        self,
        request: InferRequest,
        *,
        variant: str,
        budget_s: float,
        priority: int,
        traceparent: str,
        on_accepted: Callable[[Accepted], None],
        tracestate: str = "",
        tokens: TokenSink | None = None,
        objectives: TokenObjectives | None = None,
    ) -> Reply:
        """`on_accepted` is never called, `tokens` gets nothing, objectives are dropped: OIP has no word for them."""
        assert self._infer is not None, "used outside of its `async with`"
        if budget_s <= 0:
            raise DeadlineExceeded("no time was left to ask")
        message = self._worded(request, budget_s, priority)
        call = self._infer(message, timeout=budget_s, metadata=self._metadata(variant, traceparent, tracestate) or None)
        try:
            raw = await call
        except grpc.aio.AioRpcError as exc:
            raise _error_of(exc) from exc
        response = response_from_bytes(raw, request, any_version=self._foreign)
        if self._foreign:
            return Reply(response, variant=variant)
        trailers = _texts(await call.trailing_metadata())
        load = trailers.get(LOAD_KEY)
        return Reply(
            response,
            stages=stages_of(trailers.get(TIMING_KEY, "")),
            variant=variant,
            load=load_from_text(load) if load else None,
        )

    async def describe(self, models: Iterable[str]) -> tuple[Manifest, ...]:
        """What the server says of its models, as manifests with one variant each.

        Raises:
            ServeError: the server does not know a model, or describes it in a way that cannot be served.
        """
        return tuple([await self._describe(model) for model in models])

    async def _describe(self, model: str) -> Manifest:
        metadata = oip_pb2.ModelMetadataResponse()
        await self._ask("ModelMetadata", oip_pb2.ModelMetadataRequest(name=model), metadata)
        config = oip_pb2.ModelConfigResponse()
        try:
            await self._ask("ModelConfig", oip_pb2.ModelConfigRequest(name=model), config)
        except NotSupported:
            log.debug("a server without Triton's configuration extension", target=self._id)
        return manifest_from(metadata, config.config)

    async def _ask(self, method: str, message: Message, answer: Message) -> None:
        assert self._channel is not None, "used outside of its `async with`"
        call: Raw = self._channel.unary_unary(_SERVICE + method, None, None)
        try:
            answer.ParseFromString(await call(message.SerializeToString(), timeout=_PROBE_TIMEOUT_S))
        except grpc.aio.AioRpcError as exc:
            raise _error_of(exc) from exc
        except DecodeError as exc:
            raise BadAnswer(f"the answer to {method} cannot be read") from exc

    # what goes out

    def _worded(self, request: InferRequest, budget_s: float, priority: int) -> bytes:
        """The request's message, with this hop's parameters in place of the caller's hints."""
        if request.parameters:
            kept = {name: value for name, value in request.parameters.items() if not name.startswith("tidegate-")}
            kept.pop("priority", None)
            request = replace(request, parameters=kept)
        message = message_from_request(request)
        message.parameters["timeout"].int64_param = max(1, int(budget_s * 1e6))  # 0 would be none
        if priority:
            message.parameters["priority"].int64_param = priority
        return message.SerializeToString()

    def _metadata(self, variant: str, traceparent: str, tracestate: str) -> tuple[tuple[str, str], ...]:
        trace = ((PARENT_KEY, traceparent),) if traceparent else ()
        if traceparent and tracestate:
            trace = (*trace, (STATE_KEY, tracestate))
        if self._foreign:
            return trace
        demand = ((VARIANT_KEY, variant),) if variant else ()
        return ((HOP_KEY, GATEWAY_HOP), *demand, *trace)

    # the channel

    def _open(self) -> None:
        self._opened_as = self._dialler.version
        self._channel = self._dialler.open(self._address, self._options)
        self._infer = self._channel.unary_unary(_SERVICE + "ModelInfer", None, None)

    async def _renew(self) -> None:
        """A channel keeps its certificate for life, so that a renewed one takes a new channel."""
        if self._retired is not None:
            await self._retired.close(None)  # since the renewal before
        self._retired = self._channel
        self._open()

    # probes

    async def _probe(self, report: Callable[[LinkEvent], None]) -> None:
        while True:
            if self._dialler.version != self._opened_as:
                await self._renew()
            asked_at = clock.now()
            try:
                await self._check_ready()
                report(LinkRtt(self._id, clock.now() - asked_at))
                if not self._up:
                    report(LinkUp(self._id, self._id, 0, await self._offers()))
                self._up = True
            except ServeError as exc:
                self._down(report, exc.message)
            except Exception as exc:  # a foreign server may say anything, and probes go on
                log.exception("cannot probe a target, for a defect", target=self._id)
                self._down(report, f"it cannot be probed: {exc!r}")
            await clock.sleep(self._probe_interval_s)

    async def _check_ready(self) -> None:
        answer = oip_pb2.ServerReadyResponse()
        await self._ask("ServerReady", oip_pb2.ServerReadyRequest(), answer)
        if not answer.ready:
            raise Unreachable("the server says that it is not ready")

    async def _offers(self) -> tuple[ModelOffer, ...]:
        return tuple([offer_of(manifest) for manifest in await self.describe(self._models)])

    def _down(self, report: Callable[[LinkEvent], None], reason: str) -> None:
        if self._up is not False:
            report(LinkDown(self._id, reason))
        self._up, self._reason = False, reason


def _error_of(error: grpc.aio.AioRpcError) -> ServeError:
    """Every way in which gRPC ends a call, as the class that it is here."""
    code, details = error.code(), error.details() or ""
    trailers = _texts(error.trailing_metadata())
    if CODE_KEY not in trailers:
        if "larger than max" in details:
            return TooLarge(details)  # a request or its answer, over the limit of either side
        if code is grpc.StatusCode.CANCELLED:  # by the server, as it stops; our own cancellation is no AioRpcError
            return Unreachable(f"the server dropped the call: {details}")
    return error_from_grpc(code.name, explain_dial_error(details), trailers)


def _texts(metadata: Iterable[Any] | None) -> dict[str, str]:
    return {name: value for name, value in metadata or () if isinstance(value, str)}


def stages_of(timing: str) -> Mapping[str, float]:
    """Queue and compute of a Server-Timing text, in seconds; anything else, and what cannot be read, is left out."""
    if not timing:
        return _NO_STAGES
    stages: dict[str, float] = {}
    for entry in timing.split(","):
        name, _, duration_ms = entry.strip().partition(";dur=")
        if name in _STAGES:
            with suppress(ValueError):
                took_s = float(duration_ms) / 1e3
                stages[name] = took_s if 0.0 <= took_s <= _LONGEST_S else 0.0
    return stages

"""The request, its answer and the load report, as every part of Tidegate sees them.

Tensors stay bytes from ingress to egress. The wire formats in front of the gateway (OIP over HTTP, OIP over gRPC,
OpenAI) and behind it (link stream, OIP unary) all carry tensors as little-endian row-major bytes, so a process that
only forwards a request never decodes an element: `Tensor.raw` is a view of the received bytes. JSON numbers are turned
into bytes once, at ingress.

Everything here is frozen and free of IO. Durations are seconds, instants are of the local monotonic clock. They are
msgspec structs because a request makes some fifteen of them, and a frozen dataclass takes five times as long to make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from math import prod
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from tidegate.caller import Identity
from tidegate.placement_pin import Pin
from tidegate.text_prompt import TextPrompt
from tidegate.token_sink import TokenSink
from tidegate.trace_context import Trace

Parameter = bool | int | float | str
Parameters = Mapping[str, Parameter]
NO_PARAMETERS: Final[Parameters] = MappingProxyType({})
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
Buffer = bytes | bytearray | memoryview


class Datatype(StrEnum):
    """OIP's tensor element types, with Triton's BF16."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    BYTES = "BYTES"

    @property
    def itemsize(self) -> int:
        """Bytes per element; 0 for BYTES, whose elements carry their own lengths."""
        return _ITEMSIZE[self]

    @property
    def numpy_name(self) -> str:
        """The numpy dtype that reads the raw bytes; BF16 reads as uint16, BYTES as object."""
        return _NUMPY_NAME[self]


_ITEMSIZE: Final = {
    Datatype.BOOL: 1, Datatype.UINT8: 1, Datatype.UINT16: 2, Datatype.UINT32: 4, Datatype.UINT64: 8,
    Datatype.INT8: 1, Datatype.INT16: 2, Datatype.INT32: 4, Datatype.INT64: 8,
    Datatype.FP16: 2, Datatype.FP32: 4, Datatype.FP64: 8, Datatype.BF16: 2, Datatype.BYTES: 0,
}  # fmt: skip
_NUMPY_NAME: Final = {
    Datatype.BOOL: "?", Datatype.UINT8: "<u1", Datatype.UINT16: "<u2", Datatype.UINT32: "<u4", Datatype.UINT64: "<u8",
    Datatype.INT8: "<i1", Datatype.INT16: "<i2", Datatype.INT32: "<i4", Datatype.INT64: "<i8",
    Datatype.FP16: "<f2", Datatype.FP32: "<f4", Datatype.FP64: "<f8", Datatype.BF16: "<u2", Datatype.BYTES: "O",
}  # fmt: skip


class Tensor(msgspec.Struct, frozen=True):
    """One named tensor; `raw` is little-endian, row-major, unpadded (BYTES: each element with a uint32 length)."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    raw: Buffer
    parameters: Parameters = NO_PARAMETERS

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.datatype.value}{list(self.shape)} {len(self.raw)} bytes>"


class RequestedOutput(msgspec.Struct, frozen=True):
    name: str
    parameters: Parameters = NO_PARAMETERS


class InferRequest(msgspec.Struct, frozen=True):
    """One inference request, whichever protocol it came by. No `outputs` means all outputs."""

    model_name: str
    inputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: Parameters = NO_PARAMETERS
    text: TextPrompt | None = None  # of a generation: the same in words, for a target that takes no token ids

    def pinned(self, version: str) -> InferRequest:
        """The same request for exactly this version. Spelled out, since `replace` costs several times as much."""
        return InferRequest(
            self.model_name, self.inputs, version, self.id, self.outputs, self.parameters, text=self.text
        )

    def __repr__(self) -> str:
        version = f":{self.model_version}" if self.model_version else ""
        return f"<InferRequest {self.id or '-'} {self.model_name}{version}>"


class InferResponse(msgspec.Struct, frozen=True):
    model_name: str
    model_version: str
    outputs: tuple[Tensor, ...]
    id: str = ""
    parameters: Parameters = NO_PARAMETERS

    @property
    def size_bytes(self) -> int:
        """Of the tensors' contents."""
        return sum([len(tensor.raw) for tensor in self.outputs])


class Accepted(msgspec.Struct, frozen=True):
    """The acknowledgement that a target queued the request; durations count from its sending, without the link."""

    queue_ahead: int
    finish_in_s: float


class LoadReport(msgspec.Struct, frozen=True):
    """How busy a target is. (epoch, sequence) orders reports that come by any path: answers, link frames, MQTT."""

    epoch: int
    sequence: int
    queued: int
    in_flight: int
    queue_delay_s: float


class SplitNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request has to do with a model that may be cut between layers, for explanations."""

    of: str  # the model that the caller asked for
    role: Literal["head", "tail", "whole"]
    layer: str  # the cut; "" where there was none
    why: str


DEFERRED: Final = "deferred"  # the protocol of what a device stored while it was offline
HELP: Final = "help"  # and of what a device asks its gateway to answer for it


class Call(msgspec.Struct, frozen=True):
    """A request with everything that its caller required; a layer that learns more passes a changed copy down."""

    request: InferRequest
    protocol: str  # "oip-http" | "oip-grpc" | "openai" | "link" | DEFERRED | HELP
    arrived_at: float
    deadline: float | None = None  # an instant; None until a budget is known
    priority: int = 0  # 1 is highest, 0 means the default
    variant: str = ""  # a demanded variant, e.g. "fp32"; "" takes any
    headers: Mapping[str, str] = _NOTHING  # lower-case names; only those a layer may need
    on_accepted: Callable[[Accepted], None] | None = None
    pin: Pin = "any"  # the outermost zone that it may reach
    min_quality: float = 0.0  # of the variant that answers, 0 takes any
    tenant: str = ""  # whose quota is charged: as the caller states or its identity proves; "" if none
    identity: Identity | None = None  # the authenticated caller; None without authentication
    attested: bool = False  # only targets with verified evidence qualify
    defer: bool = False  # a ticket is accepted if a device has no good answer now; a gateway gives no tickets
    trace: Trace | None = None  # where tracing is on
    tokens: TokenSink | None = None  # where a generation's tokens go as they come; None: all come with the reply
    # Called before the first token, where a gateway knows the route, and each time that another target goes on.
    on_begun: Callable[[Route], None] | None = None
    ttft_s: float | None = None  # of a generation, the budget of its first token, from `arrived_at`; None: without
    tpot_s: float | None = None  # and of each further one, on average over the answer
    resumes: bool = True  # whether another target may go on with an answer that has begun
    # Of a request that another gateway sent on: the gateways that it has come through. Of one that a device asks for:
    # the device.
    path: tuple[str, ...] = ()
    half: SplitNote | None = None  # where its model may be cut: whether this is the whole or a half

    @property
    def asker(self) -> str:
        """The device that asks for help with this request, "edge/NAME"; "" for any other request."""
        return self.path[0] if self.protocol == HELP and self.path else ""

    def budget_s(self, now: float) -> float | None:
        """The time left until the deadline, possibly negative; None without a deadline."""
        return None if self.deadline is None else self.deadline - now

    def due(self, deadline: float) -> Call:
        """The same call with its deadline fixed. Spelled out, since `replace` costs several times as much."""
        return Call(  # positional: hot path
            self.request,
            self.protocol,
            self.arrived_at,
            deadline,
            self.priority,
            self.variant,
            self.headers,
            self.on_accepted,
            self.pin,
            self.min_quality,
            self.tenant,
            self.identity,
            self.attested,
            self.defer,
            self.trace,
            self.tokens,
            self.on_begun,
            self.ttft_s,
            self.tpot_s,
            self.resumes,
            self.path,
            self.half,
        )

    def traced(self, trace: Trace) -> Call:
        """The same call as a part of this trace. Spelled out, as above."""
        return Call(  # positional: hot path
            self.request,
            self.protocol,
            self.arrived_at,
            self.deadline,
            self.priority,
            self.variant,
            self.headers,
            self.on_accepted,
            self.pin,
            self.min_quality,
            self.tenant,
            self.identity,
            self.attested,
            self.defer,
            trace,
            self.tokens,
            self.on_begun,
            self.ttft_s,
            self.tpot_s,
            self.resumes,
            self.path,
            self.half,
        )

    def by(self, identity: Identity) -> Call:
        """The same call as made by `identity`."""
        return replace(self, identity=identity)


class TargetId(NamedTuple):
    """The name of a target in two parts; on the wire and in logs it is the string "TIER/NAME"."""

    tier: str  # "edge", "pool" or "site"
    name: str

    @classmethod
    def parse(cls, text: str) -> TargetId:
        """Text without a "/" is a tier without a name."""
        tier, _, name = text.partition("/")
        return cls(tier, name)

    def __str__(self) -> str:
        return f"{self.tier}/{self.name}"


PLANNED: Final = "planned"  # why an answer leaves a target that is well: another is the better place for its rest
ResumedGrade = Literal["exact", "continued"]


class Resumed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An answer that comes token by token was gone on with by another target, and how."""

    lost: str  # the target that it left
    by: str  # the target that went on
    at: int  # tokens that the caller had by then
    gap_s: float  # from the last token of the one to the first of the other
    grade: ResumedGrade  # whether it is the text that the first would have given, or perhaps another
    why: str  # stalled, drain, planned, or the code of the error by which it was lost
    because: str = ""  # why it is not exact, in words


class RouteHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of an answer that was computed in halves: where its first half was, and where the model was cut."""

    served_by: str
    variant: str
    layer: str


class Route(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where and why an answer was made; `tidegate-served-by` and `tidegate-route` are printed from it."""

    served_by: str  # "edge/NAME", "pool/NAME" or "site/NAME"; "cache" of a known answer
    reason: str  # cheapest, only, faster, surer, better, pinned, demanded, escalated, fallback, hedge, reserve, ...
    variant: str
    attempts: int = 1
    hedged: bool = False
    fallback: bool = False
    degraded: bool = False
    provisional: bool = False  # the model was not sure of it, and no better answer came in time
    resumed: tuple[Resumed, ...] = ()  # each time that it was gone on with elsewhere
    version: str = ""  # of the model, as far as it was chosen for the caller; the response says it in any case
    inner: Route | None = None  # of a site: its own route to the place that answered
    head: RouteHead | None = None  # where the model was cut between layers; `served_by` computed the tail


class Reply(msgspec.Struct, frozen=True):
    """An answer with what is known of how it came to be; `stages`: classify, admit, queue, link, compute → seconds."""

    response: InferResponse
    stages: Mapping[str, float] = _NOTHING
    route: Route | None = None
    budget_left_s: float | None = None
    batch_size: int = 1
    variant: str = ""
    load: LoadReport | None = None
    attested: str = ""  # the evidence that the answer rests on, if it was required
    request_id: str = ""  # the gateway's id of the request, for later queries
    batch_wait_s: float = 0.0  # of the stage `queue`: beside a free worker, for batch-mates
    link_out_s: float = 0.0  # of the stage `link`: the way there
    traceparent: str = ""  # the trace under which its caller may find it
    first_token_s: float | None = None  # of an answer that came in parts: from the request's arrival to the first
    cut: str = ""  # why an answer ends before its time, where that was decided here
    fallback_model: str = ""  # the model that answered instead of the one that was asked for
    last_known: str = ""  # of an old answer that is given since nothing else is to be had: how old, and to what
    sequence_home: str = ""  # of a step: a token of the target that has its state, for other gateways
    helped_by: str = ""  # of a device's answer: the gateway that it asked for it, and why

from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Manifests(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("hello", "request", "accepted", "answer", "refused", "cancel", "load", "ping", "pong", "chunk", "goodbye", "challenge", "evidence", "started", "tokens", "credit")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    request: Request
    accepted: Accepted
    answer: Answer
    refused: Refused
    cancel: Cancel
    load: Load
    ping: Ping
    pong: Pong
    chunk: Chunk
    goodbye: Goodbye
    challenge: Challenge
    evidence: Evidence
    started: Started
    tokens: Tokens
    credit: Credit
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "name", "epoch", "agent_version", "offers", "boot", "uptime_ms", "newest")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    epoch: int
    agent_version: str
    offers: bytes
    boot: str
    uptime_ms: int
    newest: int
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., epoch: _Optional[int] = ..., agent_version: _Optional[str] = ..., offers: _Optional[bytes] = ..., boot: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., newest: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "budget_us", "priority", "variant", "traceparent", "message", "chunked_bytes", "tracestate", "window", "ttft_us", "tpot_us", "origin")
    ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_US_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    TPOT_US_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    id: int
    budget_us: int
    priority: int
    variant: str
    traceparent: str
    message: bytes
    chunked_bytes: int
    tracestate: str
    window: int
    ttft_us: int
    tpot_us: int
    origin: Origin
    def __init__(self, id: _Optional[int] = ..., budget_us: _Optional[int] = ..., priority: _Optional[int] = ..., variant: _Optional[str] = ..., traceparent: _Optional[str] = ..., message: _Optional[bytes] = ..., chunked_bytes: _Optional[int] = ..., tracestate: _Optional[str] = ..., window: _Optional[int] = ..., ttft_us: _Optional[int] = ..., tpot_us: _Optional[int] = ..., origin: _Optional[_Union[Origin, _Mapping]] = ...) -> None: ...

class Origin(_message.Message):
    __slots__ = ("path", "tenant", "pin", "min_quality", "ttft_us", "tpot_us", "never_resumes", "attested", "authorization")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    MIN_QUALITY_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    TPOT_US_FIELD_NUMBER: _ClassVar[int]
    NEVER_RESUMES_FIELD_NUMBER: _ClassVar[int]
    ATTESTED_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZATION_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedScalarFieldContainer[str]
    tenant: str
    pin: str
    min_quality: float
    ttft_us: int
    tpot_us: int
    never_resumes: bool
    attested: bool
    authorization: str
    def __init__(self, path: _Optional[_Iterable[str]] = ..., tenant: _Optional[str] = ..., pin: _Optional[str] = ..., min_quality: _Optional[float] = ..., ttft_us: _Optional[int] = ..., tpot_us: _Optional[int] = ..., never_resumes: bool = ..., attested: bool = ..., authorization: _Optional[str] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("id", "queue_ahead", "finish_in_us")
    ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_AHEAD_FIELD_NUMBER: _ClassVar[int]
    FINISH_IN_US_FIELD_NUMBER: _ClassVar[int]
    id: int
    queue_ahead: int
    finish_in_us: int
    def __init__(self, id: _Optional[int] = ..., queue_ahead: _Optional[int] = ..., finish_in_us: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("id", "message", "chunked_bytes", "queue_us", "compute_us", "batch_size", "variant", "load", "batch_wait_us", "served_by")
    ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BATCH_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    SERVED_BY_FIELD_NUMBER: _ClassVar[int]
    id: int
    message: bytes
    chunked_bytes: int
    queue_us: int
    compute_us: int
    batch_size: int
    variant: str
    load: Load
    batch_wait_us: int
    served_by: ServedBy
    def __init__(self, id: _Optional[int] = ..., message: _Optional[bytes] = ..., chunked_bytes: _Optional[int] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., batch_size: _Optional[int] = ..., variant: _Optional[str] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., batch_wait_us: _Optional[int] = ..., served_by: _Optional[_Union[ServedBy, _Mapping]] = ...) -> None: ...

class ServedBy(_message.Message):
    __slots__ = ("target", "reason", "variant", "attempts", "hedged", "fallback", "degraded", "provisional", "request_id", "attested")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HEDGED_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    PROVISIONAL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTESTED_FIELD_NUMBER: _ClassVar[int]
    target: str
    reason: str
    variant: str
    attempts: int
    hedged: bool
    fallback: bool
    degraded: bool
    provisional: bool
    request_id: str
    attested: str
    def __init__(self, target: _Optional[str] = ..., reason: _Optional[str] = ..., variant: _Optional[str] = ..., attempts: _Optional[int] = ..., hedged: bool = ..., fallback: bool = ..., degraded: bool = ..., provisional: bool = ..., request_id: _Optional[str] = ..., attested: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("id", "code", "message", "retry_after_us", "load")
    ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_US_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    id: int
    code: str
    message: str
    retry_after_us: int
    load: Load
    def __init__(self, id: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_us: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("epoch", "sequence", "queued", "in_flight", "queue_delay_us", "offers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DELAY_US_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    queued: int
    in_flight: int
    queue_delay_us: int
    offers: bytes
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., queued: _Optional[int] = ..., in_flight: _Optional[int] = ..., queue_delay_us: _Optional[int] = ..., offers: _Optional[bytes] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("sent_at_us",)
    SENT_AT_US_FIELD_NUMBER: _ClassVar[int]
    sent_at_us: int
    def __init__(self, sent_at_us: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("sent_at_us",)
    SENT_AT_US_FIELD_NUMBER: _ClassVar[int]
    sent_at_us: int
    def __init__(self, sent_at_us: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("id", "data")
    ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    id: int
    data: bytes
    def __init__(self, id: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("proof", "refusal")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    refusal: str
    def __init__(self, proof: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("id", "prompt_tokens", "cached_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: int
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, id: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("id", "first", "ids", "logprobs", "likely")
    ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LIKELY_FIELD_NUMBER: _ClassVar[int]
    id: int
    first: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    likely: _containers.RepeatedCompositeFieldContainer[Likely]
    def __init__(self, id: _Optional[int] = ..., first: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., likely: _Optional[_Iterable[_Union[Likely, _Mapping]]] = ...) -> None: ...

class Likely(_message.Message):
    __slots__ = ("ids", "logprobs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("id", "tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: int
    tokens: int
    def __init__(self, id: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

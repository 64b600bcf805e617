"""The status codes of each protocol for each outcome, and back.

There is one table. Its numbers were chosen by how unmodified clients react to them: kserve's gRPC client retries
UNAVAILABLE only, the OpenAI SDK retries 408, 409, 429 and everything from 500 up unless `x-should-retry: false` says
that it is pointless, and both honour a wait that we name. So lateness is DEADLINE_EXCEEDED and never UNAVAILABLE, and
every refusal that a retry cannot help says so.

Two classes share a status where the protocol has only one (RESOURCE_EXHAUSTED is both too much and too large); `code`
travels beside it (`tidegate-code` in gRPC's trailing metadata, `code` in the JSON body), so that the far side rebuilds
the same class. A foreign server sends no code: then the status alone is read, in the way that does least harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, isfinite
from typing import Final

from tidegate.oip.reply import REQUEST_ID_KEY
from tidegate.outcome import (
    BadAnswer,
    BadCredential,
    DeadlineExceeded,
    Deferred,
    Forbidden,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NothingAlive,
    NotSupported,
    Overloaded,
    Poisonous,
    ServeError,
    TooLarge,
    Unauthenticated,
    Unreachable,
    error_from_code,
)

CODE_KEY: Final = "tidegate-code"
REFUSED_KEY: Final = "tidegate-refused"
RETRY_AFTER_KEY: Final = "retry-after-ms"
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
TICKET_KEY: Final = "tidegate-ticket"

# A message travels in gRPC's trailing metadata too, where 8 KiB is the limit for everything together.
MAX_MESSAGE_CHARACTERS: Final = 1000

_STATUS: Final[dict[type[ServeError], tuple[int, str]]] = {
    InvalidRequest: (400, "INVALID_ARGUMENT"),
    TooLarge: (413, "RESOURCE_EXHAUSTED"),
    ModelNotFound: (404, "NOT_FOUND"),
    NotSupported: (501, "UNIMPLEMENTED"),
    Unauthenticated: (401, "UNAUTHENTICATED"),
    Forbidden: (403, "PERMISSION_DENIED"),
    Overloaded: (429, "RESOURCE_EXHAUSTED"),
    DeadlineExceeded: (504, "DEADLINE_EXCEEDED"),
    NothingAlive: (503, "UNAVAILABLE"),
    # gRPC has no status for "later"; no client retries this one, and a retry would make a second ticket.
    Deferred: (202, "FAILED_PRECONDITION"),
    Unreachable: (502, "UNAVAILABLE"),
    BadAnswer: (502, "INTERNAL"),
    InternalError: (500, "INTERNAL"),
    Poisonous: (500, "INTERNAL"),
}
_INTERNAL: Final = _STATUS[InternalError]

# What a foreign server's bare status means to a gateway: Triton answers UNAVAILABLE for a model that is not ready and
# RESOURCE_EXHAUSTED for a full queue. Everything that is not named here (UNKNOWN, DATA_LOSS, ...) is a bad answer.
_FROM_GRPC: Final[dict[str, type[ServeError]]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "NOT_FOUND": ModelNotFound,
    "UNIMPLEMENTED": NotSupported,
    "RESOURCE_EXHAUSTED": Overloaded,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNAVAILABLE": Unreachable,
    "INTERNAL": InternalError,
}


def http_status(error: BaseException) -> int:
    """The HTTP status of an error; 500 for anything that is not a ServeError."""
    return _numbers(error)[0]


def grpc_status(error: BaseException) -> str:
    """The name of the gRPC status code of an error, as `grpc.StatusCode` spells it."""
    return _numbers(error)[1]


def error_code(error: BaseException) -> str:
    return error.code if isinstance(error, ServeError) else InternalError.code


def message_of(error: BaseException) -> str:
    """What the caller may read: a ServeError's own words, shortened; nothing of an unexpected exception's inside."""
    if not isinstance(error, ServeError):
        return "internal error"
    message = error.message
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else message[: MAX_MESSAGE_CHARACTERS - 1] + "…"


def error_headers(error: BaseException) -> dict[str, str]:
    """HTTP headers of a refusal: its code, and when and whether to try again."""
    headers = {REFUSED_KEY: error_code(error)}
    wait_s = retry_after_s(error)
    if wait_s is not None:
        headers[RETRY_AFTER_KEY] = _milliseconds(wait_s)
        headers["retry-after"] = str(ceil(wait_s))
    if not isinstance(error, Overloaded | NothingAlive | Unreachable):
        headers["x-should-retry"] = "false"
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = _challenge(error)
    if request_id := _request_id(error):
        headers[REQUEST_ID_KEY] = request_id
    if isinstance(error, Deferred):
        headers[TICKET_KEY] = error.ticket
        headers["Location"] = ticket_path(error.ticket)
    return headers


def error_metadata(error: BaseException) -> tuple[tuple[str, str], ...]:
    """gRPC trailing metadata of a refusal.

    If no target is alive, gRPC clients must not retry at once (-1) unless we know when to: kserve would
    otherwise try three times within a second and find the same.
    """
    metadata = [(CODE_KEY, error_code(error))]
    if isinstance(error, Deferred):
        metadata.append((TICKET_KEY, error.ticket))
    if isinstance(error, Unauthenticated):
        metadata.append(("www-authenticate", _challenge(error)))
    wait_s = retry_after_s(error)
    if wait_s is not None:
        metadata.append((RETRY_AFTER_KEY, _milliseconds(wait_s)))
    if isinstance(error, NothingAlive | Overloaded):
        metadata.append((PUSHBACK_KEY, "-1" if wait_s is None else _milliseconds(wait_s)))
    if request_id := _request_id(error):
        metadata.append((REQUEST_ID_KEY, request_id))
    return tuple(metadata)


def error_from_grpc(status: str, message: str, metadata: Mapping[str, str]) -> ServeError:
    """The error that a gRPC server answered with: by its `tidegate-code` if it sent one, else by the status."""
    wait_s = _seconds(metadata.get(RETRY_AFTER_KEY) or metadata.get(PUSHBACK_KEY))
    code = metadata.get(CODE_KEY)
    if code == Deferred.code:
        return Deferred(message, retry_after_s=wait_s, ticket=metadata.get(TICKET_KEY, ""))
    if code:
        return error_from_code(code, message, retry_after_s=wait_s)
    return _FROM_GRPC.get(status, BadAnswer)(message, retry_after_s=wait_s)


def ticket_path(ticket: str) -> str:
    """The path at which a device answers, over HTTP, for a ticket."""
    return f"/v2/tickets/{ticket}"


def retry_after_s(error: BaseException) -> float | None:
    """The wait that the error names, if it is a finite one."""
    wait_s = error.retry_after_s if isinstance(error, ServeError) else None
    return wait_s if wait_s is not None and isfinite(wait_s) and wait_s >= 0 else None


def _request_id(error: BaseException) -> str:
    return error.request_id if isinstance(error, ServeError) else ""


def _challenge(error: Unauthenticated) -> str:
    """The challenge of RFC 6750, with a reason only if the caller presented a credential."""
    reason = ', error="invalid_token"' if isinstance(error, BadCredential) else ""
    return f'Bearer realm="tidegate"{reason}'


def _numbers(error: BaseException) -> tuple[int, str]:
    # Along the ancestry, so that a protocol may refine a class (say, by the parameter that is wrong).
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), _INTERNAL)


def _milliseconds(seconds: float) -> str:
    return str(ceil(seconds * 1e3))


def _seconds(milliseconds: str | None) -> float | None:
    try:
        value = float(milliseconds) / 1e3 if milliseconds else -1.0
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None

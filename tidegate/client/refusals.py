"""A refusal over HTTP, as the error that the server raised: the class by its code, the words, and when to come back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tidegate.oip.reply import REQUEST_ID_KEY
from tidegate.oip.status import REFUSED_KEY, RETRY_AFTER_KEY, TICKET_KEY
from tidegate.outcome import (
    BadAnswer,
    DeadlineExceeded,
    Deferred,
    Forbidden,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NothingAlive,
    NotSupported,
    Overloaded,
    ServeError,
    TooLarge,
    Unauthenticated,
    Unreachable,
    error_from_code,
)

# Of a server that sends no code: another maker's, or a proxy in between.
_BY_STATUS: Final[Mapping[int, type[ServeError]]] = {
    400: InvalidRequest, 401: Unauthenticated, 403: Forbidden, 404: ModelNotFound, 405: NotSupported,
    408: DeadlineExceeded, 413: TooLarge, 422: InvalidRequest, 429: Overloaded, 500: InternalError, 501: NotSupported,
    502: Unreachable, 503: NothingAlive, 504: DeadlineExceeded,
}  # fmt: skip
_SHOWN_CHARACTERS: Final = 300


class NoConnection(Unreachable):
    """The server was not reached: nothing was sent."""


def may_have_been_done(error: ServeError) -> bool:
    """Whether a request that ended so may have had its effect all the same.

    A connection may have broken behind it, a gateway have lost its target in the middle (`unreachable`), and a proxy
    its server, which it tells by a 502 or 503 of its own.
    """
    return error.attempted or (isinstance(error, Unreachable) and not isinstance(error, NoConnection))


def error_from_http(status: int, headers: Mapping[str, str], body: bytes) -> ServeError:
    """The error of an answer that is none: any status but 200, and 202, with which a device promises one."""
    message = _message(status, body)
    wait_s = _wait_s(headers)
    code = headers.get(REFUSED_KEY, "")
    if code == Deferred.code or (status == 202 and TICKET_KEY in headers):
        return Deferred(message, retry_after_s=wait_s, ticket=headers.get(TICKET_KEY, ""))
    if code:
        error = error_from_code(code, message, retry_after_s=wait_s)
    else:
        error = _BY_STATUS.get(status, BadAnswer)(message, retry_after_s=wait_s)
        error.attempted = status >= 500  # for all that is known
    error.request_id = headers.get(REQUEST_ID_KEY, "")
    return error


def error_from_event(event: Mapping[str, Any]) -> ServeError | None:
    """The error that a stream's event says, which is how one ends that had begun; None where it says none."""
    told = event.get("error")
    if isinstance(told, str):
        return BadAnswer(told)
    if not isinstance(told, Mapping):
        return None
    return error_from_code(str(told.get("code") or ""), str(told.get("message") or "the stream failed"))


def _message(status: int, body: bytes) -> str:
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = None
    said = told.get("error") if isinstance(told, dict) else None
    if isinstance(said, dict):
        said = said.get("message")
    if isinstance(said, str) and said:
        return said
    shown = body.decode("utf-8", "replace").strip()[:_SHOWN_CHARACTERS]
    return f"HTTP status {status}" + (f": {shown}" if shown else "")


def _wait_s(headers: Mapping[str, str]) -> float | None:
    """From `retry-after-ms`, or else from `retry-after` in whole seconds; a date there counts as none."""
    for name, unit_s in ((RETRY_AFTER_KEY, 1e-3), ("retry-after", 1.0)):
        try:
            wait_s = float(headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
        if 0.0 <= wait_s < float("inf"):
            return wait_s
    return None

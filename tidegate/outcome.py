"""The outcomes of a call, defined once: error classes, their codes, and the metric's label.

An error says two things: whose fault it is, and whether another try may help. `code` travels with the status (JSON
body, gRPC trailing metadata, the link's Refused frame), so the far side rebuilds the same class with
`error_from_code`. Status numbers are not here: they belong to the protocols (`tidegate/oip/status.py`).

`Outcome` is the metric label and the end of the flight record; each request ends in exactly one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class ServeError(Exception):
    """Anything that ends a call without an answer. The message is for the caller to read."""

    code = "internal"
    retry_elsewhere = False  # may another target answer it?
    attempted = False  # whether a gateway had sent it to a target by then
    request_id = ""  # what the gateway calls the request that it ended, if it remembers it

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def without_frames(self) -> Self:
        """Let go of the frames that it passed, and of what it came of: for one that is kept, or was seen by all.

        They hold what the call held, and often the error itself: all of it would be there until garbage is collected,
        and refusals come by the thousand.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.message!r}>"


class CallerError(ServeError):
    """The caller's fault: never counts against a target's health."""


class InvalidRequest(CallerError):
    code = "invalid_request"


class TooLarge(CallerError):
    """A body, message or tensor over a configured limit."""

    code = "too_large"


class ModelNotFound(CallerError):
    code = "model_not_found"


class NotSupported(CallerError):
    code = "not_supported"


class Unauthenticated(CallerError):
    """The caller presented no credential."""

    code = "unauthenticated"


class BadCredential(Unauthenticated):
    """The credential is unknown or no longer valid. Distinguished on this side only, so it never travels."""


class Forbidden(CallerError):
    """The caller is authenticated, but has no right to this."""

    code = "forbidden"


class CapacityError(ServeError):
    """There was no room or no time; neither the caller nor a target is at fault."""


class Overloaded(CapacityError):
    """A queue is full or the request was shed; `retry_after_s` says when there should be room."""

    code = "overloaded"
    retry_elsewhere = True


class OutOfMemory(Overloaded):
    """A device had too little memory for it. Another device may have more; it travels as `overloaded`."""


class DeadlineExceeded(CapacityError):
    code = "deadline_exceeded"


class NothingAlive(CapacityError):
    code = "nothing_alive"


class ShuttingDown(NothingAlive):
    """This process drains and takes nothing new. Another one may; it travels as `nothing_alive`."""

    RETRY_AFTER_S = 1.0

    @classmethod
    def of(cls, server_name: str) -> ShuttingDown:
        """The refusal of the server of this name. A caller that waits this long has been sent elsewhere by then."""
        return cls(f"{server_name} is shutting down: ask another", retry_after_s=cls.RETRY_AFTER_S)


class Deferred(CapacityError):
    """Not answered now but promised: the answer can be fetched later by `ticket`. Only devices promise."""

    code = "deferred"

    def __init__(self, message: str, *, retry_after_s: float | None = None, ticket: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.ticket = ticket


class PeerError(ServeError):
    """A target's or a link's fault: counts against its health."""

    retry_elsewhere = True


class Unreachable(PeerError):
    code = "unreachable"


class Disconnected(Unreachable):
    """The connection ended under the call. Raised on this side only, so it never travels: the target may be well,
    and is worth another try once it is connected again."""


class BadAnswer(PeerError):
    code = "bad_answer"


class InternalError(ServeError):
    """A defect of ours, seen from far away. Nearby, the original exception is raised and logged with its traceback."""

    code = "internal"
    retry_elsewhere = True


class Poisonous(InternalError):
    """The engine raised on this request, or its worker went down, while it was tried by itself: batch-mates did not.

    It counts against the target like any defect, since a broken device fails every request that is alone on it. The
    evidence against its sender is weighed where senders are known (`gateway/core/admission/quarantine.py`).
    """

    code = "poisonous"


ERRORS: tuple[type[ServeError], ...] = (
    InvalidRequest, TooLarge, ModelNotFound, NotSupported, Unauthenticated, Forbidden, Overloaded, DeadlineExceeded,
    NothingAlive, Deferred, Unreachable, BadAnswer, InternalError, Poisonous,
)  # fmt: skip
_BY_CODE = {error.code: error for error in ERRORS}


def error_from_code(code: str, message: str, *, retry_after_s: float | None = None) -> ServeError:
    """The error that `code` names; an unknown code is a bad answer, since only a newer or foreign peer sends one."""
    return _BY_CODE.get(code, BadAnswer)(message, retry_after_s=retry_after_s)


class Outcome(StrEnum):
    """How a request ended. The values of errors are their codes."""

    OK = "ok"
    LATE = "late"
    DEGRADED = "degraded"
    CANCELLED = "cancelled"
    INVALID_REQUEST = "invalid_request"
    TOO_LARGE = "too_large"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_SUPPORTED = "not_supported"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOTHING_ALIVE = "nothing_alive"
    DEFERRED = "deferred"
    UNREACHABLE = "unreachable"
    BAD_ANSWER = "bad_answer"
    INTERNAL = "internal"
    POISONOUS = "poisonous"

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        """What is no `Exception` is a cancellation: nothing else ends a call so."""
        if not isinstance(error, Exception):
            return cls.CANCELLED
        return cls(error.code) if isinstance(error, ServeError) else cls.INTERNAL

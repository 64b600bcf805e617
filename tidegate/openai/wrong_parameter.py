"""Bodies of requests as their types, and the errors that name the parameter which is wrong.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from tidegate.outcome import InvalidRequest

Body = TypeVar("Body")

_PATH: Final = re.compile(r"\$\.(\w+)")
_FIELD: Final = re.compile(r"field `(\w+)`")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


class WrongParameter(InvalidRequest):
    """An invalid request of which OpenAI's error format can name the parameter."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def decoded_field(name: str, raw: msgspec.Raw, decode: Callable[[bytes], Body], *, max_bytes: int) -> Body:
    """A field that was left as it came, as its type. Raises WrongParameter, also for more bytes than it may have."""
    if len(raw) > max_bytes:
        raise WrongParameter(name, f"{name} has {len(raw)} bytes of JSON; at most {max_bytes} may be")
    try:
        return decode(bytes(raw))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WrongParameter(name, f"the request's JSON is wrong in {name}: {error}") from error


def decoded(body: bytes, decode: Callable[[bytes], Body]) -> Body:
    """A body as its type. Raises WrongParameter, InvalidRequest."""
    try:
        return decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        found = _PATH.search(str(error)) or _FIELD.search(str(error))
        message = f"the request's JSON is wrong: {error}"
        if found is None and _SURROGATE.search(body):  # the parser's own words mislead
            message = "the request's JSON is wrong: it may hold half of a surrogate pair, which is no character"
        raise (WrongParameter(found[1], message) if found else InvalidRequest(message)) from error

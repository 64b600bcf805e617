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

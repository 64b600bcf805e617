"""Measures the depth and the size of JSON before a parser sees it.

A parser recurses, and makes an object of every value: `[` a hundred thousand times is a deep stack, `[],` a million
times is sixty times its text in memory. Both can be counted in the text, at the speed of memory: strings are cut out
(what is in them nests nothing), only brackets are left, and their running sum is the depth. A text that is no JSON may
be counted wrongly from its first error on; the parser gets no further than that either.

Most bodies have fewer brackets than the depth that is allowed, and fewer commas than values: for those it ends there.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tidegate.oip.content_limits import ContentLimits
from tidegate.outcome import InvalidRequest, TooLarge
from tidegate.types import Buffer

_NO_BRACKET: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEP: Final = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


def check_json(json: Buffer, limits: ContentLimits) -> None:
    """Raises TooLarge for JSON of too many bytes or values, InvalidRequest where it is nested too deeply."""
    _check(json, limits, limits.max_json_elements, "values (max_json_elements): send tensors as binary data")


def check_prompt_json(json: Buffer, limits: ContentLimits, *, ids: bool = False) -> int:
    """As `check_json`, for a request for text, which has fewer values. Returns how many it has at most.

    Args:
        ids: whether its prompt may be token ids.
    """
    most = limits.max_prompt_values(ids=ids)
    return _check(json, limits, most, "values, which is the most of a request for text")


def _check(json: Buffer, limits: ContentLimits, max_values: int, words: str) -> int:
    if len(json) > limits.max_json_bytes:
        raise TooLarge(
            f"{len(json)} bytes of JSON; at most {limits.max_json_bytes} may come (max_json_bytes): "
            "send tensors as binary data"
        )
    text = bytes(json)
    if text.count(b"[") + text.count(b"{") > limits.max_json_depth:
        _check_depth(text, limits.max_json_depth)
    commas = text.count(b",")
    if commas >= max_values and (commas := _outside_strings(text).count(b",")) >= max_values:
        raise TooLarge(f"the JSON holds more than {max_values} {words}")
    return commas + 1


def _check_depth(text: bytes, max_depth: int) -> None:
    brackets = np.frombuffer(_outside_strings(text).translate(None, _NO_BRACKET), np.uint8)
    if brackets.size and int(np.cumsum(_STEP[brackets], dtype=np.int32).max()) > max_depth:
        raise InvalidRequest(f"the request's JSON is nested too deeply: at most {max_depth} levels (max_json_depth)")


def _outside_strings(text: bytes) -> bytes:
    # Backslashes pair up from left to right, so one that is left has a quote or a letter behind it. A pattern of any
    # escaped byte would do it at once, but takes thirteen times as long, in which no other thread has Python's lock.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    return b"".join(plain.split(b'"')[::2])

"""Counts the parts of a protobuf message before it is parsed, so that a small message cannot fill the memory.

Parsed, an empty entry of a repeated message (two bytes on the wire) takes some hundred bytes, and a number in typed
contents (one byte) takes eight, then an object of 32. 64 MiB of them would take gigabytes before they could be counted.
The wire format states the length of each field, so a message can be walked through without creating objects: here over
its own fields and, inside an input, over the fields of the input and of its contents.

Small messages are not walked: `SMALL_BYTES` of any content cost a few MiB at most. In large messages nearly everything
is raw contents, which is one step each, so the walk of an honest request takes microseconds, and the walk of any other
ends after `MAX_FIELDS` steps. A message that cannot be walked through is refused, so that nothing hides behind the
damage; so are groups, which no message of ours has and for which a parser recurses.

Source: Protocol Buffers, "Encoding" (tags, wire types).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from tidegate.oip.content_limits import ContentLimits
from tidegate.outcome import InvalidRequest, TooLarge

SMALL_BYTES: Final = 64 * 1024
MAX_FIELDS: Final = 2**14  # fields to walk through one by one, which strings in typed contents are as well

_RAW_INPUTS: Final = 7  # ModelInferRequest.raw_input_contents
_RAW_OUTPUTS: Final = 6
_TENSORS: Final = 5  # inputs of a request, outputs of an answer: the same layout
_ASKED: Final = 6  # ModelInferRequest.outputs
_CONTENTS: Final = 5  # of a tensor
_FIXED_BYTES: Final = {6: 4, 7: 8}  # fp32_contents, fp64_contents; all others are varints, or strings
_BYTES_CONTENTS: Final = 8

_WORDS: Final = "the bytes that came are no message of OIP"

Field = tuple[int, int, int, int]  # number, wire type, start and end of its value


class NoMessage(InvalidRequest):
    """The bytes are no protobuf message without groups."""


def check_infer_request(raw: bytes, limits: ContentLimits) -> None:
    """Raises TooLarge for a ModelInferRequest that would grow too much in parsing; InvalidRequest for no message."""
    if len(raw) > SMALL_BYTES:
        _Walk(raw, limits, _RAW_INPUTS).check()


def check_infer_response(raw: bytes, limits: ContentLimits) -> None:
    """The same check for a ModelInferResponse."""
    if len(raw) > SMALL_BYTES:
        _Walk(raw, limits, _RAW_OUTPUTS).check()


def check_envelope(raw: bytes, max_frames: int) -> bool:
    """Whether a large message has at most `max_frames` fields of its own."""
    if len(raw) <= SMALL_BYTES:
        return True
    try:
        return all(count < max_frames for count, _ in enumerate(fields(raw, 0, len(raw))))
    except NoMessage:
        return False


class _Walk:
    """The walk through one message, with the counts so far."""

    def __init__(self, raw: bytes, limits: ContentLimits, raw_field: int) -> None:
        self._raw = raw
        self._raw_field = raw_field
        self._limits = limits
        self._fields = 0
        self._elements = 0

    def check(self) -> None:
        # Two passes: the first only adds up sizes, so that a message that is too large is refused before its parts are.
        beside_raw = len(self._raw)
        for number, _, begins, ends in self._steps(0, len(self._raw)):
            beside_raw -= ends - begins if number == self._raw_field else 0
        if beside_raw > self._limits.max_json_bytes:
            raise TooLarge(
                f"{beside_raw} bytes beside raw contents; at most {self._limits.max_json_bytes} may come "
                "(max_json_bytes): send tensors as raw contents"
            )
        if beside_raw > SMALL_BYTES:
            self._look_closer()

    def _look_closer(self) -> None:
        self._fields = 0
        for number, kind, begins, ends in self._steps(0, len(self._raw)):
            if number not in (_TENSORS, _ASKED) or number == self._raw_field or kind != 2:
                continue
            for inner, inner_kind, at, until in self._steps(begins, ends):
                if number == _TENSORS and inner_kind == 2:
                    self._check_inner(inner, at, until)

    def _check_inner(self, number: int, begins: int, ends: int) -> None:
        if number != _CONTENTS:
            if number == 3 and ends - begins > 10 * self._limits.max_rank:
                raise TooLarge(f"a shape of more than {self._limits.max_rank} dimensions (max_rank)")
            return
        for field, kind, at, until in self._steps(begins, ends):
            if kind == 2 and field != _BYTES_CONTENTS:
                self._add_elements(field, at, until)

    def _add_elements(self, field: int, begins: int, ends: int) -> None:
        if field in _FIXED_BYTES:
            self._elements += (ends - begins) // _FIXED_BYTES[field]
        else:  # a varint's last byte is the only one below 128
            packed = np.frombuffer(self._raw, np.uint8, ends - begins, begins) if ends > begins else np.empty(0)
            self._elements += int(np.count_nonzero(packed < 128))
        if self._elements > self._limits.max_json_elements:
            raise TooLarge(
                f"more than {self._limits.max_json_elements} elements in typed contents (max_json_elements): send "
                "them as raw contents"
            )

    def _steps(self, begins: int, ends: int) -> Iterator[Field]:
        for field in fields(self._raw, begins, ends):
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise TooLarge(f"the message has more than {MAX_FIELDS} parts: send tensors as raw contents")
            yield field


def fields(raw: bytes, begins: int, ends: int) -> Iterator[Field]:
    """The fields of the message in raw[begins:ends]. Raises NoMessage if these bytes are no message."""
    at = begins
    while at < ends:
        tag, at = _varint(raw, at, ends)
        kind = tag & 7
        if kind == 2:
            size, at = _varint(raw, at, ends)
            until = at + size
        elif kind == 0:
            _, until = _varint(raw, at, ends)
        elif kind in (1, 5):
            until = at + (8 if kind == 1 else 4)
        else:
            raise NoMessage(_WORDS)
        if until > ends:
            raise NoMessage(_WORDS)
        yield tag >> 3, kind, at, until
        at = until


def _varint(raw: bytes, at: int, ends: int) -> tuple[int, int]:
    """The number at `at`, and the position after it."""
    value, shift = 0, 0
    while at < ends and shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise NoMessage(_WORDS)

"""Reads the calls of tools out of what a model writes, piece by piece.

A model has no other way to call a tool than to write so, in a form that its chat template has taught it:

    tagged      <tool_call>{"name": …, "arguments": {…}}</tool_call>, one or more, also a list in one tag, behind a text
                or none: Hermes, Qwen, SmolLM2
    whole       the text is {"name": …, "parameters": {…}} and nothing else, several with ; between them, or a list:
                Llama 3, Mistral

What may be the beginning of a call is held back until it is one or is not. A call is given when all of it is there; an
answer that ends within one gives it as far as it is complete JSON, for many models leave out the closing tag. What is
no call is text, to the last character: JSON that cannot be read, a name that no tool has, arguments that are no object,
more than `MAX_CALL_CHARACTERS`. White space around calls is no text.

Pure. Invariant: without a call, the texts that come out are the text that went in. Source: the chat templates of these
models; NousResearch, "Hermes Function Calling"; SmolLM2's and Llama's model cards.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

Dialect = Literal["tagged", "whole"]
MAX_CALL_CHARACTERS: Final = 64 * 1024
MAX_CALLS: Final = 128  # of one answer
MAX_DEPTH: Final = 128  # of a call's JSON; Python's own bound is another in each version, and so are its readers'
_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_WHOLE_MARKS: Final = ("<|python_tag|>", "[TOOL_CALLS]")  # tokens that are special, so they are no part of a text
_BLANK: Final = " \t\r\n"
_BETWEEN: Final = _BLANK + ";"


class ToolCall(NamedTuple):
    """One call, as the model wrote it."""

    name: str
    arguments: str  # a JSON object


class _Written(msgspec.Struct, frozen=True):
    """A call in a model's own words, of which the first of the two names is OpenAI's."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    arguments: msgspec.Raw = msgspec.Raw()  # empty: there are none
    parameters: msgspec.Raw = msgspec.Raw()


_one = msgspec.json.Decoder(_Written).decode
_several = msgspec.json.Decoder(list[_Written]).decode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_scanner = json.JSONDecoder()
_text = msgspec.json.Decoder(str).decode


def dialect_of(template: str) -> Dialect | None:
    """How a model with this chat template writes calls; None where that is not known, and calls stay text."""
    if _OPEN in template:
        return "tagged"
    if "tools" in template and (any(mark in template for mark in _WHOLE_MARKS) or '"parameters":' in template):
        return "whole"
    return None


class ToolCallReader:
    """Follows one text. `push` its parts, and `flush` at its end.

    Args:
        names: of the tools that there are.
        at_most: calls that are read; what the model calls beyond is left out.
    """

    __slots__ = ("_at_most", "_count", "_dialect", "_held", "_names", "_text_only")

    def __init__(self, dialect: Dialect, names: Collection[str], *, at_most: int = MAX_CALLS) -> None:
        self._dialect = dialect
        self._names = frozenset(names)
        self._at_most = at_most
        self._held = ""
        self._count = 0
        self._text_only = False  # of `whole`: the text has begun as no call

    @property
    def has_called(self) -> bool:
        return self._count > 0

    def push(self, text: str) -> list[str | ToolCall]:
        """What is certain now: texts, none of them empty, and calls."""
        if self._text_only:
            return [text] if text else []
        self._held += text
        return self._tagged() if self._dialect == "tagged" else self._whole()

    def flush(self) -> list[str | ToolCall]:
        """What is left at the end of the text."""
        held, self._held = self._held, ""
        body = held.strip(_BLANK)
        if self._text_only or not body:
            return [held] if held and not self._count else []
        if self._dialect == "tagged" and not body.startswith(_OPEN):
            return [held]  # part of a tag
        return self._calls_of(body.removeprefix(_OPEN), held)

    def _tagged(self) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        while self._held:
            at = self._held.find(_OPEN)
            if at < 0:
                self._give(found, len(self._held) - _waiting(self._held))
                break
            self._give(found, len(self._held[:at].rstrip(_BLANK)))
            start = len(self._held) - len(self._held.lstrip(_BLANK)) + len(_OPEN)
            end = self._held.find(_CLOSE, start)
            if end < 0 and len(self._held) <= MAX_CALL_CHARACTERS:
                break  # it goes on
            if end < 0:
                self._give(found, len(self._held))
                break
            after = end + len(_CLOSE)
            written, body = self._held[:after], self._held[start:end]
            self._held = self._held[after:]
            found += self._calls_of(body, written)
        return found

    def _whole(self) -> list[str | ToolCall]:
        begun = self._held.lstrip(_BLANK)
        if (begun and begun[0] not in "{[") or len(self._held) > MAX_CALL_CHARACTERS:
            self._text_only = True
            text, self._held = self._held, ""
            return [text]
        return []

    def _give(self, found: list[str | ToolCall], characters: int) -> None:
        """Give out so many characters as text; behind a call, only with more than white space in them."""
        text = self._held[:characters]
        if text and (text.strip(_BLANK) or not self._count):
            found.append(text)
            self._held = self._held[characters:]

    def _calls_of(self, body: str, written: str) -> list[str | ToolCall]:
        """The calls in a body, else what was written as it is."""
        calls = _read(body)
        if not calls or not all(one.name in self._names for one in calls):
            return [written]
        kept = calls[: max(0, self._at_most - self._count)]
        self._count += len(kept)
        return list(kept)

    def __repr__(self) -> str:
        return f"<ToolCallReader {self._dialect}, {self._count} calls, {len(self._held)} characters held back>"


def _waiting(text: str) -> int:
    """How many characters at the end may be the beginning of a tag, with the white space before it."""
    for length in range(min(len(_OPEN) - 1, len(text)), -1, -1):
        if text.endswith(_OPEN[:length]):
            before = text[: len(text) - length]
            return length + len(before) - len(before.rstrip(_BLANK))
    raise AssertionError("every text ends with the empty one")


def _read(body: str) -> list[ToolCall]:
    """The calls that a text is, in order; none where it is anything else as well."""
    try:
        written = [one for part in _values(body) for one in (_several(part) if part[0] == "[" else [_one(part)])]
        return [ToolCall(one.name, _arguments(one)) for one in written]
    except (ValueError, msgspec.DecodeError, RecursionError):
        return []


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = [one for one in level if isinstance(one, dict | list)]
        level = [inner for one in nested for inner in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return True


def _values(body: str) -> list[str]:
    """The JSON values in a text, with white space or ; between them. Raises ValueError."""
    values, at = [], 0
    while at < len(body):
        if body[at] in _BETWEEN:
            at += 1
            continue
        value, end = _scanner.raw_decode(body, at)
        if _is_deep(value):
            raise ValueError(f"nested in more than {MAX_DEPTH} levels")
        values.append(body[at:end])
        at = end
    return values


def _arguments(written: _Written) -> str:
    """A JSON object, word for word. Raises msgspec.DecodeError."""
    text = (bytes(written.arguments) or bytes(written.parameters) or b"{}").decode()
    if text.startswith('"'):
        text = _text(text)  # an object that was put into a string, as OpenAI has it
    _object(text)
    return text

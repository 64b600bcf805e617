"""The events of a streamed chat, line by line: parts of the text, how it ended, and what the gateway did for it.

Pure. Lines go in as they come from the connection, parts come out. A stream is whole only with OpenAI's `[DONE]`: one
that ends without it was cut, and says so instead of passing for a short answer.

Source: WHATWG HTML, "Server-sent events"; OpenAI's API reference, "Streaming".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tidegate.client.answers import CallRecord, TextAnswer, call_record
from tidegate.client.refusals import error_from_event
from tidegate.openai.deltas import merged_deltas
from tidegate.outcome import BadAnswer, Disconnected

MAX_LINE_BYTES: Final = 4 << 20


class LineBuffer:
    """Cuts what comes from a connection into lines; a line that never ends is no stream."""

    def __init__(self) -> None:
        self._rest = b""

    def __repr__(self) -> str:
        return f"<LineBuffer {len(self._rest)} bytes>"

    def add(self, chunk: bytes) -> list[str]:
        """The lines that are whole now. Raises BadAnswer for one that is too long."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise BadAnswer(f"an event of the server's stream is longer than {MAX_LINE_BYTES} bytes")
        return [line.removesuffix(b"\r").decode("utf-8", "replace") for line in lines]


class ChatEvents:
    """Reads one stream. `read(line)` gives the text that a line brings; `answer()` all of it, once `done`."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.done = False
        self._words = dict(headers)
        self._deltas: list[Mapping[str, Any]] = []
        self._finish_reason = ""
        self._usage: Mapping[str, int] = {}

    def __repr__(self) -> str:
        return f"<ChatEvents {len(self._deltas)} parts{', done' if self.done else ''}>"

    @property
    def served(self) -> CallRecord:
        """Where it is written, from the first part on; all of it once the stream has ended."""
        return call_record(self._words)

    def read(self, line: str) -> str:
        """The text of one line; empty for comments, ends of events, and events without text.

        Raises:
            ServeError: the server ended the stream by an error, or the line cannot be read.
        """
        name, _, value = line.partition(":")
        if name != "data":
            return ""
        value = value.removeprefix(" ")
        if value == "[DONE]":
            self.done = True
            return ""
        try:
            event = msgspec.json.decode(value)
            return self._take(event)
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
            raise BadAnswer(f"an event of the server's stream cannot be read: {error}") from error

    def answer(self) -> TextAnswer:
        """The whole answer.

        Raises:
            Disconnected: the stream ended before its end.
        """
        if not self.done:
            raise Disconnected("the stream was cut before its end")
        found = merged_deltas(self._deltas)
        calls = tuple(found.get("tool_calls") or ())
        return TextAnswer(found.get("content", ""), self._finish_reason, self._usage, self.served, calls)

    def _take(self, event: Mapping[str, Any]) -> str:
        if (error := error_from_event(event)) is not None:
            raise error
        self._words.update({str(name): str(value) for name, value in (event.get("tidegate") or {}).items()})
        self._usage = event.get("usage") or self._usage
        text = ""
        for choice in (event.get("choices") or ())[:1]:
            delta = choice.get("delta") or {}
            self._deltas.append(delta)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            text = delta.get("content") or ""
        return text

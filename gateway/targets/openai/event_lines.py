"""Server-sent events out of the bytes of a stream, with a bound on what an event may hold.

An event is lines of fields up to an empty line; of the fields `data` counts, and `error`, by which llama-server said
for some years what went wrong. Lines end with a line feed, with or without a carriage return before it: a return alone
is allowed by the format, and no server of ours to talk to sends it.

Pure. Source: HTML Living Standard, section 9.2, "Server-sent events".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tidegate.outcome import BadAnswer

MAX_EVENT_BYTES: Final = 2**20  # the ids of an answer of 100,000 tokens, which SGLang gives once more with each event
DONE: Final = b"[DONE]"
_COUNTED: Final = frozenset({b"data", b"error"})


class EventReader:
    """The events of one stream. Mutable: `feed` takes its bytes as they come.

    Args:
        most_bytes: of an event, and of a line.
    """

    __slots__ = ("_buffer", "_event", "_event_bytes", "_most_bytes", "_searched")

    def __init__(self, most_bytes: int = MAX_EVENT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()  # the line that has not ended
        self._searched = 0  # of it, for its end
        self._event: list[bytes] = []  # the lines of the event that has not ended
        self._event_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """What the events that end in this chunk hold, one by one: those before a bad one count.

        To be read to the end before the next chunk. Raises BadAnswer for an event that is too large.
        """
        self._buffer += chunk
        begin = 0
        while (end := self._buffer.find(b"\n", max(begin, self._searched))) >= 0:
            line = bytes(self._buffer[begin:end]).removesuffix(b"\r")
            begin = end + 1
            if line:
                self._take(line)
            elif self._event:
                event = b"\n".join(self._event)
                self._event, self._event_bytes = [], 0
                yield event
        del self._buffer[:begin]
        self._searched = len(self._buffer)
        self._check(len(self._buffer))

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name in _COUNTED:  # a comment begins with the colon, and has no name
            line_bytes = len(line) + 1  # with its end: an entry without a value takes its place as well
            self._check(line_bytes)
            self._event.append(value.removeprefix(b" "))
            self._event_bytes += line_bytes

    def _check(self, more_bytes: int) -> None:
        if self._event_bytes + more_bytes > self._most_bytes:
            raise BadAnswer(f"an event of more than {self._most_bytes} bytes")

    def __repr__(self) -> str:
        return f"<EventReader {self._event_bytes + len(self._buffer)} bytes of an event>"

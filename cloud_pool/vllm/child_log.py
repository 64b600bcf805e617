"""What a server prints, in our log: a line each, cut where it is long, and so many a second at most.

Its last lines are kept, since they are most often why it has ended. Mutable: `feed`, and `last_words`.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final

import structlog

from tidegate import clock

_MAX_LINE_BYTES: Final = 2000
_LINES_A_SECOND: Final = 20.0
_BURST: Final = 200.0  # a start tells of its settings, and of a hundred routes
_KEPT: Final = 40
_LAST: Final = 12
_MAX_WORDS: Final = 2000  # characters of an error
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

log = structlog.get_logger("vllm")


class ChildLog:
    """The output of one server, of this name in our log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rest = b""
        self._skips = False  # the rest of a line that was cut
        self._kept: deque[str] = deque(maxlen=_KEPT)
        self._room = _BURST
        self._at = clock.now()
        self._left_out = 0

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(rest) > _MAX_LINE_BYTES:
            self._line(rest)
            rest, self._skips = b"", True
        self._rest = rest

    @property
    def last_line(self) -> str:
        return self._kept[-1] if self._kept else ""

    def last_words(self) -> str:
        """Its last lines, for an error: those that say ERROR or name one, where there are such, else the last ones."""
        telling = [line for line in self._kept if "error" in line.lower()]
        words = " | ".join((telling or list(self._kept))[-_LAST:])
        return words[-_MAX_WORDS:]

    def _line(self, line: bytes) -> None:
        skipped, self._skips = self._skips, False
        text = line[:_MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        text = _CONTROLS.sub("", _COLOURS.sub("", text))
        if skipped or not text:
            return
        self._kept.append(text)
        now = clock.now()
        self._room = min(_BURST, self._room + (now - self._at) * _LINES_A_SECOND)
        self._at = now
        if self._room < 1.0:
            self._left_out += 1
            return
        self._room -= 1.0
        left_out, self._left_out = self._left_out, 0
        log.info("server says", worker=self._name, line=text, **({"left_out": left_out} if left_out else {}))

    def __repr__(self) -> str:
        return f"<ChildLog {self._name} {len(self._kept)} lines kept>"

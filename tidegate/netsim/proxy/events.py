"""The event log of a link: for a failing test's report, a status line, or JSON on stdout.

Bounded: the newest `KEPT` are kept and the others are counted. Times are seconds since the link began, on a monotonic
clock. Events: open, close, apply, toxic, heal, partition, scenario, forgot, limit, stall, refused, violation, ended.
Only `violation` is an error, and always a defect of the proxy: it has lost or invented bytes.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

KEPT: Final = 10_000


@dataclass(frozen=True, slots=True)
class LinkEvent:
    at_s: float
    link: str
    what: str
    fields: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        return {"at_s": round(self.at_s, 6), "link": self.link, "event": self.what, **self.fields}

    def as_json(self) -> str:
        return json.dumps(self.plain(), separators=(",", ":"), default=str)

    def __str__(self) -> str:
        words = " ".join(f"{key}={value}" for key, value in self.fields.items())
        return f"{self.at_s:10.4f} s  {self.link}  {self.what}  {words}".rstrip()


class EventLog:
    """Mutable. `on_event` is called with each event as it happens."""

    def __init__(self, on_event: Callable[[LinkEvent], None] | None = None, kept: int = KEPT) -> None:
        self._events: deque[LinkEvent] = deque(maxlen=kept)
        self._on_event = on_event
        self.total = 0

    def add(self, event: LinkEvent) -> None:
        self.total += 1
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def events(self, what: str | None = None) -> list[LinkEvent]:
        """Those that are kept, oldest first; of one kind, or all."""
        return [event for event in self._events if what in (None, event.what)]

    def text(self, newest: int | None = None) -> str:
        """A line each, and a line that says how many are missing."""
        shown = self.events()
        if newest is not None:
            shown = shown[-newest:]
        missing = self.total - len(shown)
        return "\n".join([*([f"… {missing} earlier events"] if missing else []), *map(str, shown)])

    def __repr__(self) -> str:
        return f"<EventLog {self.total} events>"

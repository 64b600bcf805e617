"""How long a child process has said nothing that it says every second: what tells one that hangs from one that works.

Its exit is no matter of this: a process whose event loop hangs holds its ports open, and connections to them wait for
ever. Seconds that are no fault of its own do not count: those in which it was ready and got no core, and those in which
this process stood still itself (a suspended machine, a debugger), when what it has said lies unread.

One that hangs is ended by SIGABRT, at which it still says on stderr where it stands, and if that does nothing by
SIGKILL, which cannot be held up.
"""

from __future__ import annotations

import signal
from typing import Final

from tidegate import clock
from tidegate.runtime.starvation import starved_s

SPEAKS_EVERY_S: Final = 1.0
HANGS_AFTER_S: Final = 5.0
LOOK_S: Final = 1.0
_STOOD_STILL_S: Final = 1.0  # later than that a look is this process's own delay


class ProcessSilence:
    """Of the process of this id: call `spoken` when something is heard of it, and `look` every `LOOK_S`."""

    __slots__ = ("_heard_at", "_looked_at", "_pid", "_starved_before_s", "ended_for")

    def __init__(self, pid: int) -> None:
        self.ended_for = ""  # what it was ended for, to be told behind how it ended
        self._pid = pid
        self._looked_at = clock.now()
        self.spoken()

    def spoken(self) -> None:
        self._heard_at, self._starved_before_s = clock.now(), starved_s(self._pid)

    def look(self) -> float:
        """Seconds of its silence so far."""
        now = clock.now()
        if now - self._looked_at > LOOK_S + _STOOD_STILL_S:
            self.spoken()
        self._looked_at = now
        return max(0.0, now - self._heard_at - (starved_s(self._pid) - self._starved_before_s))

    def is_hung(self) -> bool:
        """Look, and whether it is silent for too long."""
        return self.look() > HANGS_AFTER_S

    def end_by(self, why: str = "") -> signal.Signals:
        """The signal to end it by; the next time, the one after that. Args: why: "": for its silence."""
        by = signal.SIGKILL if self.ended_for else signal.SIGABRT
        self.ended_for = f", {why or f'silent for {HANGS_AFTER_S:g} s'}"
        return by

    def __repr__(self) -> str:
        return f"<ProcessSilence of {self._pid}: {clock.now() - self._heard_at:.1f} s>"

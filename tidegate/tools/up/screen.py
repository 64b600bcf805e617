"""The screen of `tidegate up` shows progress while the system starts, then a table, then a line per request.

On a terminal, steps spin and show how long they take; elsewhere (a pipe, a log, CI) the same words come as plain
lines. With `--json` all of it goes to stderr, so that stdout carries nothing but the ready line.

A screen must never slow the system down. Request lines are printed by a thread of their own from a bounded queue, so a
terminal that is paused (Ctrl-S) or a pipe without a reader fills the queue and no more: the children's events are
read on, and what could not be shown is counted. More lines in a second than anyone can read are counted, too.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tidegate import clock
from tidegate.runtime.duration import printed_duration
from tidegate.tools.up.messages import request_line

REQUEST_LINES_PER_S: Final = 50
QUEUED_LINES_MAX: Final = 200
PLAIN_WIDTH: Final = 200  # a pipe has no width; addresses and model names must not be cut


class ProgressStep:
    """One long part of the start, as the user sees it; `update` shows what it is doing now."""

    def __init__(self, screen: Screen, title: str, progress: Progress | None, task: TaskID | None) -> None:
        self._screen = screen
        self._title = title
        self._progress = progress
        self._task = task
        self._last = ""

    def update(self, event: Mapping[str, Any]) -> None:
        """Show a `progress` event: `what`, and how far where it says `done_ratio`."""
        what = str(event.get("what", ""))
        if self._progress is not None and self._task is not None:
            ratio = event.get("done_ratio")
            total = None if ratio is None else 1.0  # a bar without a total swings
            self._progress.update(self._task, description=f"{self._title}: {what}", completed=ratio, total=total)
        elif what != self._last:
            self._screen.say(f"  {what}")
        self._last = what


class Screen:
    def __init__(self, *, to_stderr: bool = False) -> None:
        self._stream = sys.stderr if to_stderr else sys.stdout
        self._console = Console(file=self._stream, highlight=False)
        if not self._console.is_terminal:
            self._console.width = PLAIN_WIDTH
        self._lines: queue.Queue[str] = queue.Queue(QUEUED_LINES_MAX)
        self._budget = LineBudget(REQUEST_LINES_PER_S)
        self._printer: threading.Thread | None = None
        self._count: asyncio.TimerHandle | None = None  # set while a count of hidden lines is due

    def say(self, words: str, style: str = "") -> None:
        """A line, never wrapped and never taken for markup, since it may be a command to copy."""
        self._console.print(Text(words, style=style), soft_wrap=True)

    @contextmanager
    def step(self, title: str) -> Iterator[ProgressStep]:
        """Show a long part while it lasts, and how long it took when it is done."""
        began_at = clock.now()
        if self._console.is_terminal:
            with self._progress() as progress:
                yield ProgressStep(self, title, progress, progress.add_task(title, total=None))
        else:
            self.say(f"{title} …")
            yield ProgressStep(self, title, None, None)
        self.say(f"✓ {title} ({printed_duration(clock.now() - began_at)})")

    def table(self, rows: list[tuple[str, str, str, str]]) -> None:
        table = Table("part", "address", "pid", "models and variants", box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)

    def request(self, served: Mapping[str, Any]) -> None:
        """Show a request; never blocks."""
        if self._budget.allows(clock.now()):
            self._offer(request_line(served))
        elif self._count is None:
            self._count = asyncio.get_running_loop().call_later(1.0, self._tell_hidden)

    def _tell_hidden(self) -> None:
        self._count = None
        self._offer(f"… and {self._budget.take_hidden()} more requests, too many to show")

    def _offer(self, line: str) -> None:
        if self._printer is None:
            self._printer = threading.Thread(target=self._print_lines, name="request lines", daemon=True)
            self._printer.start()
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._budget.hide()

    def _print_lines(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # the reader is gone; the system serves on
                return

    def _progress(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )


class LineBudget:
    """At most so many lines a second; what is hidden is counted."""

    def __init__(self, lines_per_s: int) -> None:
        self._lines_per_s = lines_per_s
        self._second = -1
        self._shown = 0
        self._hidden = 0

    def allows(self, now: float) -> bool:
        if int(now) != self._second:
            self._second, self._shown = int(now), 0
        if self._shown >= self._lines_per_s:
            self.hide()
            return False
        self._shown += 1
        return True

    def hide(self) -> None:
        self._hidden += 1

    def take_hidden(self) -> int:
        """The number of lines hidden since the last call."""
        hidden, self._hidden = self._hidden, 0
        return hidden

    def __repr__(self) -> str:
        return f"<LineBudget {self._shown}/{self._lines_per_s} this second, {self._hidden} hidden>"

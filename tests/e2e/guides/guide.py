"""A page that is followed command by command: all of them run but those that a table leaves out with a reason.

    Guide   types what the page says, in its order, and so runs a command that the page gets anew by itself
    Page    gives its commands to a test, which types its own models, devices and ids for those that the page names

In a guide a program that serves in the foreground keeps its terminal, and what comes next is typed in another one. What
a section began ends before the next one begins, since a reader of the next may not have read the one before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Final, Self

from tests.contract.pages.text import blocks
from tests.e2e.guides.commands import Command, commands, left_out
from tests.e2e.guides.left_out import LEFT_OUT
from tests.e2e.guides.reader import Reader, is_ready
from tests.e2e.guides.terminal import Terminal, Typed
from tests.e2e.stack import eventually

READY_WITHIN_S: Final = 150.0
SAID_WITHIN_S: Final = 60.0
TYPED_AGAIN_S: Final = 1.0  # a command of ours takes as long of a core to say that it is not so yet
_SERVES: Final = re.compile(r"(?m)(?:^|\s)tidegate (?:up|pool|edge|gateway)(?= --|\s*&|\s*$|\s+#)")


def to_run(page: str) -> list[Command]:
    """The page's commands without those that the table leaves out."""
    return [one for one in commands(page) if not left_out(one, LEFT_OUT)]


class Page:
    """The `with` ends well when every command was taken."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._left = [one.text for one in to_run(path)]

    def take(self, begins: str, words: Mapping[str, str] | None = None) -> str:
        """The next command that begins so, with these words in the place of the page's."""
        found = next((one for one in self._left if one.startswith(begins)), None)
        assert found is not None, f"{self._path} has no further command that begins with {begins!r}: {self._left}"
        self._left.remove(found)
        for said, typed in (words or {}).items():
            assert said in found, f"{self._path}: {said!r} is not in {found!r}"
            found = found.replace(said, typed)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert kind is not None or not self._left, f"{self._path}: neither run nor left out: {self._left}"


class Guide:
    """Leaving the `with` runs the rest of the page; `until` and `step` go on from where the page is."""

    def __init__(self, reader: Reader, page: str, *, with_options: dict[str, str] | None = None) -> None:
        """Args:
        with_options: by a command's beginning, what is typed behind it beside what the page says.
        """
        self._reader = reader
        self._page = page
        self._left = to_run(page)
        self._options = with_options or {}
        self._terminals: list[Terminal] = []
        self._section: str | None = None
        self._busy = False

    def until(self, begins: str, says: str) -> str:
        """Go on up to the next command that begins so, and type that again until it says this; returns all of it."""
        while self._left and not self._left[0].text.startswith(begins):
            self.step()
        assert self._left, f"the page has no further command that begins with {begins}"
        return self.step(says).printed

    def save(self, name: str) -> None:
        """The file that the page shows under this name."""
        (text,) = (one.text for one in blocks(self._page, "yaml") if one.text.startswith(f"# {name}\n"))
        (self._reader.folder / name).write_text(text)

    def step(self, says: str = "") -> Typed:
        """The next command; again and again until it says this, and until it serves if it is one that does."""
        command = self._left.pop(0)
        if command.section != self._section:
            self.end()
            self._section = command.section
        if not self._terminals or self._busy:
            self._terminals.append(self._reader.terminal())
            self._busy = False
        terminal, text = self._terminals[-1], self._text(command)
        if _SERVES.search(text):
            self._busy = not text.partition("  #")[0].rstrip().endswith("&")
            return serve(terminal, text)
        return self._said(terminal, text, says) if says else terminal.type(text)

    def end(self) -> None:
        """End all that runs."""
        terminals, self._terminals = self._terminals, []
        for terminal in reversed(terminals):
            terminal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while kind is None and self._left:
                self.step()
        finally:
            with suppress(AssertionError) if kind else nullcontext():
                self.end()

    def _text(self, command: Command) -> str:
        text = command.text
        if command.kind == "python":
            path = self._reader.folder / f"block_{command.line}.py"
            path.write_text(text)
            text = f"python {path.name}"
        for begins, options in self._options.items():
            if begins in text:
                text = text.replace(begins, f"{begins} {options}", 1)
        return text

    def _said(self, terminal: Terminal, text: str, says: str) -> Typed:
        """Type it until it ends well and says this: what was just begun may not know everything yet."""

        def is_said() -> bool:
            typed = terminal.tried(text)
            return typed.code == 0 and re.search(says, typed.printed) is not None

        _wait(is_said, SAID_WITHIN_S, f"it says {says}", terminal, every_s=TYPED_AGAIN_S)
        return terminal.typed[-1]


@contextmanager
def serving(reader: Reader, *typed: str) -> Iterator[Terminal]:
    """A terminal in which this was typed, and in which the last of it serves: what a page takes as there."""
    terminal = reader.terminal()
    try:
        for command in typed[:-1]:
            terminal.type(command)
        serve(terminal, typed[-1])
        yield terminal
    finally:
        terminal.close()


def serve(terminal: Terminal, text: str) -> Typed:
    """Type a command that serves, behind `&` or in the foreground, and wait until it does."""
    in_background = text.partition("  #")[0].rstrip().endswith("&")
    typed = terminal.type(text) if in_background else terminal.begin(text)
    _wait(lambda: _is_served(typed) or _has_failed(typed), READY_WITHIN_S, "it serves", terminal)
    assert _is_served(typed), f"it does not serve:\n{typed}"
    return typed


def _wait(
    happened: Callable[[], bool], within_s: float, what: str, terminal: Terminal, *, every_s: float = 0.1
) -> None:
    try:
        eventually(happened, within_s, what, every_s=every_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{terminal!r}") from None


def _is_served(typed: Typed) -> bool:
    return any(is_ready(line) or line.startswith("requests, as they are served") for line in typed.printed.splitlines())


def _has_failed(typed: Typed) -> bool:
    """Whether a process says that it could not start, or a command why it did not."""
    return any(line.startswith(('{"event":"failed"', "Error: ")) for line in typed.printed.splitlines())

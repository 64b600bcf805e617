"""The commands of a page, as a reader types them one after another, and those that nobody types in tests, with why.

Commands stand in blocks of `sh`, in `console` behind `$` (what follows is what they print), and in `python`, which is
run as a file. A command may be of several lines: behind a backslash, within quotes, up to the end of a here-document.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.contract.pages.text import Piece
from tests.e2e.guides.reader import sections

KINDS: Final = ("sh", "bash", "console", "python")


class Command(NamedTuple):
    """One command of a page, under its heading."""

    page: str
    line: int  # of its block
    section: str
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


def commands(page: str) -> list[Command]:
    """Every command of the page, in its order."""
    return [
        Command(page, block.line, heading, block.kind, text)
        for heading, found in sections(page, *KINDS).items()
        for block in found
        for text in _typed(block)
    ]


def left_out(command: Command, table: dict[str, dict[str, str]]) -> str:
    """Why this command is not run by tests, by a table of pages and of how commands begin; "" if it is.

    Words that end with a line's end are the whole command.
    """
    typed = f"{command.text}\n"
    return next((why for words, why in table.get(command.page, {}).items() if typed.startswith(words)), "")


def _typed(block: Piece) -> Iterator[str]:
    if block.kind == "python":
        yield block.text
        return
    is_console, typed = block.kind == "console", ""
    for line in block.text.splitlines():
        if is_console and not typed and not line.lstrip().startswith("$ "):
            continue  # printed
        typed += line.lstrip().removeprefix("$ ") if is_console and not typed else "\n" + line if typed else line
        if not re.sub(r"^\s*(#.*)?$", "", typed):
            typed = ""
        elif _is_whole(typed):
            yield typed
            typed = ""
    assert not typed, f"{block.place}: a command that does not end: {typed}"


def _is_whole(typed: str) -> bool:
    """Whether a shell would run it now, and not wait for more."""
    if typed.endswith(("\\", "|")):
        return False
    read = subprocess.run(["bash", "-n", "-c", typed], capture_output=True, check=False)
    return read.returncode == 0 and not read.stderr

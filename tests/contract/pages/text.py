"""The pages that users read, cut into what names something: code blocks, code within prose, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.lint.tree import ROOT, tracked

CHANGELOG: Final = "CHANGELOG.md"  # it speaks of names as they were then
_FENCE: Final = re.compile(r"^(\s*)```(\w*)\s*$")
_CODE: Final = re.compile(r"`([^`]+)`")


class Piece(NamedTuple):
    """Text of a page, and where it begins."""

    page: str
    line: int
    text: str
    kind: str = ""  # the language after the fence of a block

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page of the documentation, by its path in the checkout."""
    return [path for path in tracked(".md") if path != CHANGELOG]


def deployed(*endings: str) -> list[str]:
    """Files of `deploy/` with these endings."""
    return [path for path in tracked(*endings) if path.startswith("deploy/")]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def blocks(path: str, *kinds: str) -> list[Piece]:
    """The fenced blocks of a page, of these kinds or of all."""
    return [block for block, _ in _cut(path) if block is not None and (not kinds or block.kind in kinds)]


def prose(path: str) -> list[Piece]:
    """The lines of a page that stand outside of blocks."""
    return [line for _, line in _cut(path) if line is not None]


def inline_code(path: str) -> Iterator[Piece]:
    """What stands between backticks outside of blocks, also where it goes on in the next line."""
    lines = prose(path)
    text = "\n".join(one.text for one in lines)
    starts = [one.line for one in lines]
    for found in _CODE.finditer(text):
        if "\n\n" not in found[1] and "|" not in found[1].replace("\\|", ""):
            yield Piece(path, starts[text.count("\n", 0, found.start())], " ".join(found[1].split()))


def rows(path: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Piece]]:
    """Each row of each table, with the table's head."""
    head: tuple[str, ...] = ()
    for line in prose(path):
        if not line.text.startswith("|"):
            head = ()
            continue
        cells = tuple(one.strip() for one in line.text.strip().strip("|").split("|"))
        if not head:
            head = cells
        elif not set("".join(cells)) <= set("-: "):
            yield head, cells, line


def _cut(path: str) -> Iterator[tuple[Piece | None, Piece | None]]:
    """Each block and each line outside of blocks."""
    inside: list[str] | None = None
    begun, kind = 0, ""
    for number, line in enumerate(read(path).splitlines(), 1):
        fence = _FENCE.match(line)
        if inside is None and fence:
            inside, begun, kind = [], number + 1, fence[2]
        elif inside is not None and fence:
            yield Piece(path, begun, "\n".join(inside), kind), None
            inside = None
        elif inside is not None:
            inside.append(line)
        else:
            yield None, Piece(path, number, line)


def resolve(path: str) -> Path:
    return ROOT / path

"""A page whose commands stand for a reader's own: a test types each of them with its words, or leaves it out with why.

A page that explains a fleet names its models, devices and ids; who follows it types others in their place. A test takes
the page's commands by how they begin, says which words it has instead, and the page is followed when none is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tests.contract.pages.text import blocks
from tests.e2e.guides.commands import commands

_PROGRAMS = ("tidegate ", "curl ", "pip ", "python ", "make ", "kubectl ", "$ ")


class Page:
    """The `with` ends well when every command was taken or is left out, and nothing is left out that is not there."""

    def __init__(self, path: str, *, left_out: Mapping[str, str] | None = None) -> None:
        """Args:
        left_out: by how a command begins, why it is not run.
        """
        self._path = path
        self._left_out = left_out or {}
        found = [one.text for one in commands(path)]
        self._stale = [begins for begins in self._left_out if not any(one.startswith(begins) for one in found)]
        self._left = [one for one in found if not one.startswith(tuple(self._left_out))]

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
        if kind is not None:
            return
        assert not self._left, f"{self._path}: neither run nor left out: {self._left}"
        assert not self._stale, f"{self._path}: left out, but not there: {self._stale}"
        unmarked = [
            block.place
            for block in blocks(self._path, "")
            if any(line.startswith(_PROGRAMS) for line in block.text.splitlines())
        ]
        assert not unmarked, f"commands in a block that is not marked as `sh` or `console`: {unmarked}"

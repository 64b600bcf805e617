"""What a docstring, a comment or a page cites exists: a file of this repository, and a heading in it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Mapping
from os.path import normpath
from typing import Final

from tests.lint.tree import ROOT, Source, Violation, tracked

_HEADING: Final = re.compile(r"(docs/[\w./-]+\.md),\s+\"([^\"]+)\"")
_PAGE: Final = re.compile(r"(?<![\w/-])((?:[\w.-]+/)*[\w-]+\.md)\b")
_MODULE: Final = re.compile(r"(?<![\w/.<{-])((?:\w+/)+\w+\.(?:py|js|c))\b")
# Names that users give to files of their own, in examples.
EXAMPLES: Final = frozenset({"tests/conftest.py", "tests/test_payments.py", "tests/bench/NAME.py"})


def dead_citations(sources: Iterable[Source]) -> list[Violation]:
    """Citations in Python files whose file or heading is not there."""
    known = tracked("")
    headings = {path: _headings(path) for path in known if path.endswith(".md")}
    return [
        violation
        for source in sources
        for line, text in _prose(source)
        for violation in _dead(source.path, line, text, known, headings)
    ]


def dead_citations_of_pages() -> list[Violation]:
    """The same in the pages of the documentation."""
    known = tracked("")
    headings = {path: _headings(path) for path in known if path.endswith(".md")}
    return [
        violation
        for path in headings
        if path != "CHANGELOG.md"  # it speaks of files as they were called then
        for violation in _dead(path, 1, (ROOT / path).read_text(encoding="utf-8"), known, headings)
    ]


def _dead(
    path: str, line: int, text: str, known: list[str], headings: Mapping[str, frozenset[str]]
) -> Iterable[Violation]:
    files = set(known)
    flat = re.sub(r"\n\s*(#\s*)?", " ", text)
    for page, heading in _HEADING.findall(flat):
        if page in headings and heading not in headings[page]:
            yield Violation(path, line, f'{page} has no heading "{heading}"')
    folder = path.rpartition("/")[0]
    for pattern in (_PAGE, _MODULE):
        for named in pattern.findall(text):
            if not _exists(named, folder, files) and named not in EXAMPLES:
                yield Violation(path, line, f"{named} is not in this repository")


def _exists(named: str, folder: str, files: set[str]) -> bool:
    return (
        named in files
        or normpath(f"{folder}/{named}") in files
        or f"docs/{named}" in files
        or any(path.endswith("/" + named) for path in files)
    )


def _headings(path: str) -> frozenset[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return frozenset(line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#"))


def _prose(source: Source) -> Iterable[tuple[int, str]]:
    """Comments and docstrings, each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node.body[0].lineno, text

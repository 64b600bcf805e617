"""Real English text that every machine with Python has: the docstrings of the standard library and Python's licence.

Quality measured on made-up tokens says nothing, and a download is not to be counted on. Docstrings are prose of all
lengths, from three words to a page. They are read with `ast`, so nothing is imported or run. Same Python, same corpus:
files are taken in order of name and texts are picked evenly, without chance.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])|\n\s*\n")
_FEWEST_CHARACTERS = 12


def texts(count: int) -> list[str]:
    """`count` different texts: two thirds single sentences, one third whole docstrings and licence paragraphs.

    Raises:
        LookupError: this Python came without its sources.
    """
    passages = _unique(_passages(Path(sysconfig.get_paths()["stdlib"])))
    sentences = _unique(part for passage in passages for part in _SENTENCE_END.split(passage))
    whole = [passage for passage in passages if _SENTENCE_END.search(passage)]
    short = count - count // 3
    if len(sentences) < short or len(whole) < count // 3:
        raise LookupError("this Python has no standard library sources to take sentences from")
    return _evenly(sentences, short) + _evenly(whole, count // 3)


def _passages(library: Path) -> Iterator[str]:
    licence = library / "LICENSE.txt"
    if licence.is_file():
        yield from licence.read_text(encoding="utf-8").split("\n\n")
    for path in sorted(library.glob("*.py")):
        yield from _docstrings(path)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def _unique(passages: Iterator[str]) -> list[str]:
    stripped = (passage.strip() for passage in passages)
    return list(dict.fromkeys(passage for passage in stripped if len(passage) >= _FEWEST_CHARACTERS))


def _evenly(items: list[str], count: int) -> list[str]:
    return [items[index * len(items) // count] for index in range(count)]

"""A class name stands for one thing in the whole product."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from tests.lint.tree import Source, Violation

# A protocol and its implementation may share a name; each such name with its reason.
SHARED: Final[frozenset[str]] = frozenset()


def repeated_class_names(sources: Iterable[Source]) -> list[Violation]:
    """Every definition of a class name that is defined more than once."""
    places: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for source in sources:
        if source.is_product:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append((source.path, node.lineno))
    return [
        Violation(path, line, f"the class name {name} is used {len(found)} times: {', '.join(at for at, _ in found)}")
        for name, found in sorted(places.items())
        if len(found) > 1 and name not in SHARED
        for path, line in found
    ]

"""Nothing is constructed from more than six positional values: a reader cannot tell the seventh."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Final

from tests.lint.tree import Source, Violation

MOST_POSITIONAL: Final = 6
HOT: Final = "positional: hot path"  # a comment on a line of the call, where keywords would cost what was measured


def positional_construction(sources: Sequence[Source]) -> list[Violation]:
    """Calls of the product's own classes with too many positional arguments."""
    classes = {
        node.name
        for source in sources
        if source.is_product
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }
    return [
        Violation(source.path, call.lineno, f"{name} is constructed from {len(call.args)} positional values")
        for source in sources
        if source.is_product
        for call, name in _constructions(source.tree)
        if name in classes and len(call.args) > MOST_POSITIONAL and not _is_hot(source, call)
    ]


def _constructions(tree: ast.Module) -> Iterable[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield node, name


def _is_hot(source: Source, call: ast.Call) -> bool:
    lines = source.text.splitlines()[max(0, call.lineno - 2) : call.end_lineno]
    return any(HOT in line for line in lines)

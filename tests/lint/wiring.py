"""Finished objects are not wired from outside: a callback is given to a constructor, or set in a composition root.

An assignment to an attribute of another object is a hidden arrow when the attribute holds a collaborator: a function,
or an object that its constructor left open (`self.uplink: Uplink | None = None`) and whose methods it calls. The import
rules cannot see such an arrow.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Final

from tests.lint.tree import Source, Violation

COMPOSITION_ROOTS: Final = frozenset({"gateway/app.py", "edge_agent/app.py", "cloud_pool/app.py"})
# Objects of libraries that are configured by assignment.
FOREIGN: Final = frozenset(
    {
        "tidegate/link/frames.py",  # protobuf's messages
        "tidegate/oip/grpc/server.py",  # protobuf's messages
        "tidegate/mqtt/session.py",  # paho's client takes its callbacks so
        "tidegate/servers/http_server.py",  # aiohttp's request handler
        "tidegate/security/tls.py",  # ssl's SNI callback
        "tidegate/tools/broker/embedded.py",  # amqtt, patched
    }
)


def wired_from_outside(sources: Sequence[Source]) -> list[Violation]:
    """Assignments of collaborators to attributes of other objects."""
    product = [source for source in sources if source.is_product]
    functions = {
        node.name
        for source in product
        for node in ast.walk(source.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_property(node)
    }
    called = {name for source in product for name in _called_through(source.tree)}
    open_ends = called & {name for source in product for name in _open_ends(source.tree)}
    return [
        Violation(source.path, target.lineno, f"{ast.unparse(target)} is set from outside: give it to the constructor")
        for source in product
        if source.path not in COMPOSITION_ROOTS | FOREIGN
        for target, value in _assignments(source.tree)
        if not _is_copy(target, value)
        and (_is_collaborator(value, functions) or (target.attr in open_ends and not isinstance(value, ast.Constant)))
    ]


def _is_copy(target: ast.Attribute, value: ast.expr) -> bool:
    """The same datum of another object: `view.busy_s = slot.busy_s`."""
    return isinstance(value, ast.Attribute) and value.attr == target.attr


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        getattr(one, "id", getattr(one, "attr", "")) in ("property", "cached_property") for one in node.decorator_list
    )


def _assignments(tree: ast.Module) -> Iterable[tuple[ast.Attribute, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterable[tuple[ast.Attribute, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            yield from _pairs(one, its)
    elif isinstance(target, ast.Attribute) and not _is_own(target):
        yield target, value


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def _is_collaborator(value: ast.expr, functions: set[str]) -> bool:
    if isinstance(value, ast.Lambda):
        return True
    return isinstance(value, ast.Attribute) and (value.attr in functions or value.attr == "get")


def _called_through(tree: ast.Module) -> Iterable[str]:
    """Attributes of `self` on which methods are called, or which are called themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            held = node.func
            if isinstance(held, ast.Attribute) and not _is_own(held):
                held = held.value
            if isinstance(held, ast.Attribute) and _is_own(held):
                yield held.attr


def _open_ends(tree: ast.Module) -> Iterable[str]:
    """Attributes that a constructor annotates as a collaborator or None, and leaves at None."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Attribute)
            and _is_own(node.target)
            and isinstance(node.value, ast.Constant)
            and node.value.value is None
            and not node.target.attr.startswith("_")
        ):
            named = {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}
            if any(name[:1].isupper() for name in named):
                yield node.target.attr

"""What `make wheel-compiled` compiles: one list in pyproject.toml, and modules that the compiler gets right.

The rules are those that mypyc breaks silently or only where the line is run. `make test-compiled` sets
`TIDEGATE_COMPILED` and runs the tests of the listed rooms against the installed wheel; the last test here holds it to
having really been that wheel.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from zipfile import ZipFile

import pytest

from tidegate.runtime.compiled import is_compiled

ROOT: Final = Path(__file__).parents[2]
_PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL: Final[dict[str, Any]] = _PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
HOOK: Final[dict[str, Any]] = WHEEL["hooks"]["mypyc"]
_CLASS: Final = re.compile(r"^ *class (\w+)\(([^()]*)\)", re.MULTILINE)
_WORD: Final = re.compile(r"\w+")
# Made by a metaclass from annotations, so that a subclass elsewhere is an ordinary one.
_OPEN: Final = {"NamedTuple", "Protocol", "Enum", "StrEnum", "IntEnum", "TypedDict"}


def _found(pattern: str) -> set[Path]:
    return set(ROOT.glob(pattern.removeprefix("/") if pattern.startswith("/") else f"**/{pattern}"))


@cache
def listed() -> tuple[Path, ...]:
    left_out = {path for pattern in HOOK["exclude"] if pattern.startswith("/") for path in _found(pattern)}
    found = {path for pattern in HOOK["include"] for path in _found(pattern)}
    return tuple(sorted(path for path in found - left_out if path.name != "__init__.py"))


def _trees(paths: tuple[Path, ...] | list[Path]) -> Iterator[tuple[Path, ast.Module]]:
    for path in paths:
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def _classes(tree: ast.AST) -> Iterator[tuple[ast.ClassDef, set[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node, {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


def _begins_with_a_float(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Tuple):
        return bool(value.elts) and _begins_with_a_float(value.elts[0])
    return isinstance(value, ast.Constant) and isinstance(value.value, float)


@pytest.mark.parametrize("pattern", [*HOOK["include"], *(one for one in HOOK["exclude"] if one.startswith("/"))])
def test_each_pattern_of_the_list_names_modules_that_exist(pattern: str) -> None:
    assert _found(pattern)


def test_a_wheel_is_pure_unless_it_is_asked_to_be_compiled() -> None:
    assert HOOK["enable-by-default"] is False
    assert list(WHEEL["hooks"]) == ["mypyc"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is installed for `make test-compiled` only")
def test_a_plain_build_makes_a_wheel_for_any_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.slow
def test_no_listed_module_has_a_msgspec_struct() -> None:
    """The compiler drops what stands beside the bases (`frozen=True`), and the annotations that msgspec decodes by."""
    found = ((path, node, of) for path, tree in _trees(listed()) for node, of in _classes(tree))
    structs = [f"{path}: {node.name}" for path, node, of in found if "Struct" in of]
    assert not structs, "move them to a module that is not compiled"


@pytest.mark.slow
def test_no_constant_tuple_begins_with_a_float_without_a_type() -> None:
    """mypyc takes such a constant for one that was never set; as `Final[tuple[float, ...]]` it is an object."""
    taken = [
        f"{path}:{node.lineno}"
        for path, tree in _trees(listed())
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.annotation) == "Final"
        and isinstance(node.value, ast.Tuple)
        and _begins_with_a_float(node.value)
    ]
    assert not taken, "write Final[tuple[float, ...]]"


@pytest.mark.slow
def test_no_module_that_stays_interpreted_inherits_from_a_compiled_class() -> None:
    closed = {node.name for _, tree in _trees(listed()) for node, of in _classes(tree) if not of & _OPEN}
    others = {path for package in WHEEL["packages"] for path in (ROOT / package).rglob("*.py")}.difference(listed())
    heirs = [
        f"{path}: class {name}({bases})"
        for path in others
        for name, bases in _CLASS.findall(path.read_text(encoding="utf-8"))  # a tree of each file would take seconds
        if closed.intersection(_WORD.findall(bases))
    ]
    assert not heirs, "a compiled class takes no interpreted subclass"


@pytest.mark.skipif("TIDEGATE_COMPILED" not in os.environ, reason="`make test-compiled` alone installs that wheel")
def test_every_listed_module_is_the_compiled_one() -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in listed()]
    plain = [name for name in names if not str(importlib.import_module(name).__file__).endswith(".so")]
    assert len(names) > 50
    assert not plain
    assert is_compiled()

"""The files that the rules read, parsed once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from tests.bench.provenance import git

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = ("gateway", "edge_agent", "cloud_pool", "tidegate", "simulator")
GENERATED: Final = "tidegate/rpc/"


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str  # relative to the checkout
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def is_product(self) -> bool:
        return self.path.partition("/")[0] in PRODUCT


@dataclass(frozen=True)
class Violation:
    """Where a rule is broken, and the way out."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def tracked(*endings: str) -> list[str]:
    """Files of the checkout that are tracked or new, and not ignored."""
    return sorted({path for path in listed(ROOT) if path.endswith(endings) and (ROOT / path).is_file()})


def listed(root: Path) -> list[str]:
    """What git lists; in an export without git, everything that is not hidden or compiled."""
    found = git("ls-files", "--cached", "--others", "--exclude-standard", root=root)
    if found is not None:
        return found.splitlines()
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return [str(path) for path in paths if not any(part[0] == "." or part == "__pycache__" for part in path.parts)]


def sources() -> list[Source]:
    """Every Python file that is not generated."""
    return [
        Source(path, (ROOT / path).read_text(encoding="utf-8"))
        for path in tracked(".py")
        if not path.startswith(GENERATED)
    ]

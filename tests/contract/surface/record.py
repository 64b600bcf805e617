"""The recorded public surface: each part of it as one sorted file of lines, made by running the product's own code.

What users, operators and peers depend on stands in `recorded/*.txt`, one fact a line, `NAME / OF / THE / PLACE: what it
is`. A rename inside of the code base leaves every line as it is; a line that goes or comes is a change of the surface.

    python -m tests.contract.surface.record          write what is there now, where such a change is meant

No snapshot holds a module path, a class name or prose (help texts, descriptions). The collectors import what they need
of the product at the top of their modules, so that a rename is followed there and nowhere else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.contract.surface import declared, processes, wire

RECORDED: Final = Path(__file__).with_name("recorded")
COMMAND: Final = "python -m tests.contract.surface.record"
SNAPSHOTS: Final[Mapping[str, Callable[[], Any]]] = {
    "answers": processes.answers,
    "cli": declared.commands,
    "configuration": declared.configurations,
    "databases": wire.databases,
    "entry_points": declared.entry_points,
    "headers": wire.headers,
    "literals": wire.literals,
    "messages": wire.messages,
    "metrics": processes.metrics,
    "openapi": declared.openapi,
    "protos": wire.protos,
    "pytest_plugin": declared.pytest_plugin,
    "routes": processes.routes,
    "words": wire.words,
}


def lines(name: str) -> list[str]:
    """The snapshot of this name as the code is now."""
    return sorted(set(_flat(SNAPSHOTS[name](), ())))


def recorded(name: str) -> list[str]:
    return _file(name).read_text(encoding="utf-8").splitlines()


def difference(name: str) -> str:
    """What went and what came since the snapshot was recorded; "" where nothing did."""
    now, before = lines(name), recorded(name)
    gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    return "\n".join([f"- {line}" for line in gone] + [f"+ {line}" for line in new])


def main() -> None:
    RECORDED.mkdir(exist_ok=True)
    for stray in {path.stem for path in RECORDED.iterdir()} - SNAPSHOTS.keys():
        _file(stray).unlink()
    for name in SNAPSHOTS:
        found = lines(name)
        _file(name).write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
        sys.stdout.write(f"{name}: {len(found)} lines\n")


def _file(name: str) -> Path:
    return RECORDED / f"{name}.txt"


def _flat(tree: Any, at: tuple[str, ...]) -> Iterator[str]:
    """A line for each leaf: a plain value, a list of plain values, or `...` where the name is all there is to say."""
    if tree is ...:
        yield " / ".join(at)
    elif isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flat(value, (*at, str(key)))
    elif isinstance(tree, list) and any(isinstance(one, dict | list) for one in tree):
        for number, value in enumerate(tree):
            yield from _flat(value, (*at, str(number)))
    else:
        plain = isinstance(tree, str) and tree
        text = tree if plain else json.dumps(tree, ensure_ascii=False, sort_keys=True, default=str)
        yield f"{' / '.join(at)}: {text}"


if __name__ == "__main__":
    main()

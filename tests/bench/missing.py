"""A bench without one of its packages ends with one line that says what brings it, and not with a traceback.

`python -m tests.bench.NAME` imports this package before the bench itself, so the hook is there before its imports.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Final

OURS: Final = frozenset({"gateway", "edge_agent", "cloud_pool", "simulator", "tidegate", "tests"})


def words_of(error: BaseException) -> str:
    """What to say instead of a traceback; "" where the traceback is what is wanted."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        return "" if package in OURS else f"this bench needs {package}: `make setup` installs all that benches need"
    return str(error) if "pip install 'tidegate[" in str(error) else ""


def install() -> None:
    """Say in one line what is missing, where the interpreter would print a traceback."""
    printed = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if words := words_of(error):
            sys.stderr.write(f"{words}\n")
        else:
            printed(kind, error, trace)

    sys.excepthook = say

"""The imports of a process's start run without collections, and what they made is set aside afterwards.

Imports make a quarter of a million objects that live as long as the process. The collector walks through them again
and again while they come, and a full collection walks through all of them ever after, in the middle of a request. So
it is off meanwhile, and then they are frozen (`gc.freeze`). Anything that is garbage at that moment is kept too, which
is next to nothing at a start and would be wrong later.

structlog imports rich for the tracebacks that it draws on a terminal. Where stderr is none they are never drawn, and
structlog is told that rich is not installed; whoever wants rich itself imports it as ever.

Both are a fifth of the CPU time in which a process starts. This file imports nothing that costs anything.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled_imports() -> Iterator[None]:
    """For the imports within: no collections, and no collection ever looks at what they made."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def import_structlog() -> None:
    """Import structlog, without rich where stderr is no terminal. Does nothing where either is there already."""
    if "structlog" in sys.modules or "rich" in sys.modules or (sys.stderr is not None and sys.stderr.isatty()):
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python says that there is no such module
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]

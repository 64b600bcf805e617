"""The imports of a process's start run without collections, and what they made is set aside afterwards.

Imports make a quarter of a million objects that live as long as the process. The collector walks through them again
and again while they come, and a full collection walks through all of them ever after, in the middle of a request. So
it is off meanwhile, and then they are frozen (`gc.freeze`). Anything that is garbage at that moment is kept too, which
is next to nothing at a start and would be wrong later.

Some libraries import others that they could do without, and never use them here. structlog imports rich for the
tracebacks that it draws on a terminal, and where stderr is none they are never drawn. paho imports dnspython to find
brokers by SRV records, which no part asks it for. Such a library is told that the other is not installed (`absent`);
whoever wants the other itself imports it as ever.

Together this is a quarter of the CPU time in which a process starts. This file imports nothing that costs anything.

gRPC hooks itself into `fork`, and asks the environment whether to as it is imported. A child that is started through
uvloop comes by `fork` and `exec`; with the hook, gRPC's threads begin anew in the child before it has become another
program, and where calls were under way some three children in a hundred died of it, "killed by SIGSEGV" at their start.
Workers and most other children come by `vfork` (`spawned_process.py`), which runs no hooks; a few short-lived ones come
through uvloop still. No process of ours goes on in a fork, so the hook is off; whoever set the variable keeps it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled_imports() -> Iterator[None]:
    """For the imports within: no collections, no collection ever looks at what they made, and no hook into `fork`."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def settle_collector() -> None:
    """For a server that is about to serve: what its start made is never looked at, and the rest is collected rarely.

    By Python's own thresholds 3 to 5 % of a busy pool server's time went into collections that found nothing: what a
    request makes is freed by its counts of references.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@contextmanager
def absent(module: str) -> Iterator[None]:
    """For the imports within: `module` is not installed. Changes nothing where it is imported already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # how Python says that there is no such module
    try:
        yield
    finally:
        del sys.modules[module]


def import_structlog() -> None:
    """Import structlog, without rich where stderr is no terminal. Does nothing where either is there already."""
    if "structlog" in sys.modules or "rich" in sys.modules or (sys.stderr is not None and sys.stderr.isatty()):
        return
    with absent("rich"):
        import structlog  # noqa: F401

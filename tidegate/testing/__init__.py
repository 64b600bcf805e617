"""Simulated links, traces and whole stacks for users' own tests; with pytest, the plugin gives them as fixtures.

    from tidegate.testing import LinkThread

    links = LinkThread(seed=7)
    lte = links.link("127.0.0.1:8001", "lte_driving")  # connect the client under test to lte.address
    lte.partition("blackhole", for_s=3.0)
    links.close()

The names of `__all__` are public; the modules behind them may move. What belongs here is what a test of a user's own
project needs: links as objects that any thread may use (`links.py`), links on a timeline (`netsim.py`), recordings of
real links (`traces.py`), a running gateway, pool, edges and broker with links between them (`stack.py`), and ports
(`ports.py`). The emulation itself is in `tidegate.netsim`. Nothing in this room imports a process, the simulator, gRPC
or a runtime: a user's project may have packages called `gateway` and `simulator` of its own.

The links run on an event loop in a thread of their own, so a test that blocks, or whose own loop is busy, does not
bend the network. Importing this package imports none of its modules until one of their names is used, because pytest
imports it, with the plugin, in every run where Tidegate is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.netsim.links.trace import CapacityTrace
    from tidegate.netsim.proxy.link import LinkError
    from tidegate.testing.links import LinkThread, SimLink
    from tidegate.testing.netsim import Netsim
    from tidegate.testing.ports import NoPorts, free_port, free_ports, is_free
    from tidegate.testing.stack import ControlledLink, Stack, StackFailed
    from tidegate.testing.traces import TraceFinder, TraceMissing

__all__ = [
    "CapacityTrace",
    "ControlledLink",
    "LinkError",
    "LinkThread",
    "Netsim",
    "NoPorts",
    "SimLink",
    "Stack",
    "StackFailed",
    "TraceFinder",
    "TraceMissing",
    "free_port",
    "free_ports",
    "is_free",
]

_HOMES = {
    "tidegate.netsim.links.trace": ("CapacityTrace",),
    "tidegate.netsim.proxy.link": ("LinkError",),
    "tidegate.testing.links": ("LinkThread", "SimLink"),
    "tidegate.testing.netsim": ("Netsim",),
    "tidegate.testing.ports": ("NoPorts", "free_port", "free_ports", "is_free"),
    "tidegate.testing.stack": ("ControlledLink", "Stack", "StackFailed"),
    "tidegate.testing.traces": ("TraceFinder", "TraceMissing"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """The public name, from its module, which is imported at the first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

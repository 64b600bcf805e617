"""`tidegate up` checks that each port of its plan is free (`tidegate/runtime/ports.py`) before it starts a child.

The answer may be outdated a moment later; then the child that needed the port reports the error itself.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from tidegate.runtime.ports import try_listen
from tidegate.tools.up.plan import PORTS_FLAG, PlannedPort


class PortsTaken(Exception):
    """At least one port cannot be had; the message names each, what it was for, and the flag."""


def check_free(ports: Iterable[PlannedPort]) -> None:
    """Raises:
    PortsTaken: a port is in use, or may not be used by this user.
    """
    problems = [
        f"  port {port.number} on {port.host} ({port.purpose}): {why}" for port in ports if (why := _problem_with(port))
    ]
    if problems:
        raise PortsTaken("\n".join([f"cannot start; choose other ports with {PORTS_FLAG} N:", *problems]))


def _problem_with(port: PlannedPort) -> str:
    try:
        try_listen(port.host, port.number)
    except OSError as error:
        return "already in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
    except (UnicodeError, OverflowError) as error:
        return str(error)
    return ""

"""Whether every port is free, asked before anything heavy starts.

A port is tried by listening on it for an instant. The option that lets a server restart at once (SO_REUSEADDR) is set,
as the servers set it, so that connections of an earlier run that linger in TIME_WAIT do not count as taken; the one
that lets several servers share a port (SO_REUSEPORT, gRPC's default) is not, so that a gRPC server on the port is
found.

The answer may be outdated a moment later; then the child that needed the port says so itself.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable

from tidegate.tools.up.plan import PORTS_FLAG, PlannedPort


class PortsTaken(Exception):
    """At least one port cannot be had; the message names each, what it was for, and the flag."""


def check_free(ports: Iterable[PlannedPort]) -> None:
    """Raises:
    PortsTaken: a port is in use, or may not be used by this user.
    """
    problems = [
        f"  port {port.number} on {port.host} ({port.purpose}): {why}" for port in ports if (why := _why_not(port))
    ]
    if problems:
        raise PortsTaken("\n".join([f"cannot start; choose other ports with {PORTS_FLAG} N:", *problems]))


def _why_not(port: PlannedPort) -> str:
    family = socket.AF_INET6 if ":" in port.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((port.host, port.number))
            trial.listen(1)
        except OSError as error:
            return "already in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        except (UnicodeError, OverflowError) as error:
            return str(error)
    return ""

"""The limits of a port: how many connections, how large their headers, and how long they may take.

Plain numbers; their keys are in the section `limits` (`limits_config.py`). Over HTTP all of them hold. Over gRPC the
library owns the connections: it holds their number, the streams on each, the size of metadata and idle times, but it
has no count per client and cannot evict (docs/security.md says so to users).

The files that a process may open are one budget for all its ports (`limits_by_port`). gRPC takes a fixed number at its
start, so the budget is cut into fixed shares: idle connections on one port never take a file from another's share.
"""

from __future__ import annotations

import resource
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final, Literal

import structlog

_RESERVED_FILES: Final = 512  # logs, models, targets, the broker
_FEW_CONNECTIONS: Final = 128  # that are kept even so, where half of the files are enough for them

PortGroup = Literal["http", "grpc", "link", "operators"]
# Sixteenths of the budget. Half is for inference over HTTP, whatever else is open; what no port takes is gRPC's.
_SIXTEENTHS: Final[dict[PortGroup, int]] = {"http": 8, "grpc": 3, "link": 3, "operators": 2}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Attributes:
    max_connections: of one port, or of all before they are shared out; 0: what `connection_budget` leaves.
    header_timeout_s: from a request's first byte to the end of its headers; a TLS handshake has as long.
    idle_timeout_s: without any request, from the first or the last on.
    """

    max_connections: int = 0
    max_connections_per_client: int = 1024
    max_header_bytes: int = 8190
    max_headers: int = 128
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    max_streams: int = 1024

    @property
    def connections(self) -> int:
        return self.max_connections or connection_budget()


def connection_budget() -> int:
    """The connections of all ports together: the files that this process may open beyond what it needs itself.

    Where they are few, at most half of them: a process out of files accepts nothing, and so evicts nothing idle either.
    """
    files = _files()
    return max(files - _RESERVED_FILES, min(_FEW_CONNECTIONS, files // 2))


def _files() -> int:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if files == resource.RLIM_INFINITY else files


def limits_by_port(limits: ServerLimits, ports: Collection[PortGroup]) -> dict[PortGroup, ServerLimits]:
    """The limits of each of a process's ports, among which is `grpc`; their connections are at most those of `limits`.

    Args: ports: "operators" are all ports that share one `ConnectionTable`.
    """
    total = limits.connections
    if not limits.max_connections and _files() < _RESERVED_FILES + _FEW_CONNECTIONS:
        log.warning(
            "this process may open few files, and takes few connections",
            files=_files(),
            connections=total,
            way_out=f"raise its limit of open files (ulimit -n, LimitNOFILE) to {2 * _RESERVED_FILES} at least",
        )
    share = {port: total * _SIXTEENTHS[port] // 16 for port in ports}
    share["grpc"] = total - sum(most for port, most in share.items() if port != "grpc")
    return {port: replace(limits, max_connections=max(1, most)) for port, most in share.items()}


def raise_file_limit() -> None:
    """As many open files as the system allows this process: a soft limit of 1024 is there for programs of select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


DEFAULT: Final = ServerLimits()

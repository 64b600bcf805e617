"""The limits of a port: how many connections, how large their headers, and how long they may take.

Plain numbers; their keys are in the section `limits` (`limits_config.py`). Over HTTP all of them hold. Over gRPC the
library owns the connections: it holds their number, the streams on each, the size of metadata and idle times, but it
has no count per client and cannot evict (docs/security.md says so to users).
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Final

_RESERVED_FILES: Final = 512  # logs, models, targets, the broker, the other ports


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Attributes:
    max_connections: of one port; 0: half of the files that this process may open beyond what it needs itself.
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
        return self.max_connections or default_max_connections()


def default_max_connections() -> int:
    """Half of the files that may be open: a port is HTTP or gRPC, and there is one of each."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        files = 2**20
    return max(64, (files - _RESERVED_FILES) // 2)


def raise_file_limit() -> None:
    """As many open files as the system allows this process: a soft limit of 1024 is there for programs of select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


DEFAULT: Final = ServerLimits()

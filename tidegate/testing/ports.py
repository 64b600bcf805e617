"""Free ports for servers that must know their port before they listen, or take it again after they were killed.

The ports are below the range that the system hands out by itself: a connection of any process may take one of that
range before the server does. A port that was given out here is not given out again soon.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Final

from tidegate.runtime import ports as runtime_ports

_FIRST: Final = 20_000
_BEYOND: Final = 32_000  # Linux hands out from 32768 on, others from 49152
_REMEMBERED: Final = 2_000
_TRIES: Final = 200
_given: deque[int] = deque(maxlen=_REMEMBERED)


class NoPorts(Exception):
    """No such row of free ports was found."""


def free_port() -> int:
    """A port on loopback that is free. Raises NoPorts."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free. Raises NoPorts."""
    for _ in range(_TRIES):
        first = random.SystemRandom().randrange(_FIRST, _BEYOND - count)
        ports = range(first, first + count)
        if all(port not in _given and is_free(port) for port in ports):
            _given.extend(ports)
            return first
    raise NoPorts(f"no {count} free ports in a row were found between {_FIRST} and {_BEYOND}")


def is_free(port: int) -> bool:
    """Whether a server could listen there just now."""
    return runtime_ports.is_free("127.0.0.1", port)

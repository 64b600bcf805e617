"""Free ports for servers that must know their port before they listen, or take it again after they were killed.

The ports are below the range that the system hands out by itself: a connection of any process may take one of that
range before the server does. A port that was given out here is not given out again soon. Each worker of pytest-xdist
takes ports of a part of its own, since a server may listen only seconds after its port was found to be free.
"""

from __future__ import annotations

import os
import random
from collections import deque
from typing import Final

from tidegate.runtime import ports as runtime_ports

_FIRST: Final = 20_000
_BEYOND: Final = 32_000  # Linux hands out from 32768 on, others from 49152
_REMEMBERED_RATIO: Final = 1 / 6
_MAX_PARTS: Final = 60  # so that a part has room for a row
_TRIES: Final = 200
_given: deque[int] = deque()


class NoPorts(Exception):
    """No such row of free ports was found."""


def free_port() -> int:
    """A port on loopback that is free. Raises NoPorts."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free. Raises NoPorts."""
    own = worker_ports(os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ.get("PYTEST_XDIST_WORKER_COUNT", ""))
    while len(_given) > len(own) * _REMEMBERED_RATIO:
        _given.popleft()
    for _ in range(_TRIES):
        first = random.SystemRandom().randrange(own.start, own.stop - count)
        ports = range(first, first + count)
        if all(port not in _given and is_free(port) for port in ports):
            _given.extend(ports)
            return first
    raise NoPorts(f"no {count} free ports in a row were found between {own.start} and {own.stop}")


def worker_ports(worker: str, workers: str) -> range:
    """The ports for this worker of so many, in pytest-xdist's words ("gw1", "4"); all of them for anything else."""
    number = worker.removeprefix("gw")
    if not (number.isdecimal() and workers.isdecimal() and int(workers)):
        return range(_FIRST, _BEYOND)
    parts = min(int(workers), _MAX_PARTS)
    width = (_BEYOND - _FIRST) // parts
    first = _FIRST + int(number) % parts * width
    return range(first, first + width)


def is_free(port: int) -> bool:
    """Whether a server could listen there just now."""
    return runtime_ports.is_free("127.0.0.1", port)

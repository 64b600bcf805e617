"""Events report a process's state to its parent: one JSON object a line on stdout.

`tidegate up` starts the processes and reads these lines: `ready` when a process serves, `served` for each answered
request (the gateway, with `access_log: json`), `failed` with the reason when it cannot start. Logs go to stderr and
are for people. Others of this process may hear what was emitted (`heard_by`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_hearers: list[Callable[[str], None]] = []


@contextmanager
def heard_by(hearer: Callable[[str], None]) -> Iterator[None]:
    """Inside of it, `hearer` is called with the name of each event once its line is written."""
    _hearers.append(hearer)
    try:
        yield
    finally:
        _hearers.remove(hearer)


def emit(event: str, **fields: Any) -> None:
    """Write one event line and flush it, so that a parent on a pipe sees it at once.

    Where nothing takes the line (a full disk, a reader that has ended) it is lost, and not the request or the process
    that it tells of.
    """
    _write(json.dumps({"event": event, **fields}, separators=(",", ":"), default=str) + "\n")
    for hearer in _hearers:
        hearer(event)


def _write(line: str) -> None:
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except OSError:
        pass
    except ValueError:  # the stream was closed
        if not sys.stdout.closed:
            raise

"""Events report a process's state to its parent: one JSON object a line on stdout.

`tidegate up` starts the processes and reads these lines: `ready` when a process serves, `served` for each answered
request (the gateway, with `access_log: json`), `failed` with the reason when it cannot start. Logs go to stderr and
are for people.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tidegate.storage.disk_failure import is_disk_failure


def emit(event: str, **fields: Any) -> None:
    """Write one event line and flush it, so that a parent on a pipe sees it at once.

    Where stdout is a file on a disk that takes nothing the line is lost, and not the request that it tells of.
    """
    line = json.dumps({"event": event, **fields}, separators=(",", ":"), default=str) + "\n"
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except OSError as error:
        if not is_disk_failure(error):
            raise

"""The admin reader fetches JSON and streams from a running gateway's admin port, or ends the command with an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tidegate.admin_client import WITHIN_S, Admin, AdminAnswer


def read_admin(admin: str, path: str) -> Any:
    """Return the JSON at `path` of the admin port."""
    return Admin(admin).read(path)


@contextmanager
def stream_admin(admin: str, path: str, *, silent_s: float = WITHIN_S) -> Iterator[AdminAnswer]:
    """Open the stream at `path`, to be read line by line.

    Args:
        silent_s: for how long the stream may send nothing.
    """
    with Admin(admin, within_s=silent_s).answer(path) as response:
        yield response

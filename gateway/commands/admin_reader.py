"""What this package's commands read of a running gateway's admin port; where there is none, they end with words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from tidegate.admin_client import WITHIN_S, Admin


def read_admin(admin: str, path: str) -> Any:
    """The JSON at `path` of the admin port."""
    return Admin(admin).read(path)


@contextmanager
def stream_admin(admin: str, path: str, *, silent_s: float = WITHIN_S) -> Iterator[IO[bytes]]:
    """The same as it comes, line by line; `silent_s` is how long nothing may come."""
    with Admin(admin, within_s=silent_s).answer(path) as response:
        yield response

"""Tidegate: one inference endpoint in front of your devices and your GPU pool.

This package holds what the gateway, the edge agent and the pool share, and imports none of them. The modules at its top
are the ground floor: types, outcomes, the clock, the configuration loader and the command. Each folder is a room for
one subject; its `__init__` says what lives there. Code that only one process needs belongs to that process.

    from tidegate import AsyncTidegate, Tidegate      # the client: tidegate/client, extra `client`

The client is imported when one of its names is used, for every process begins by importing this package; type checkers
find the names in `__init__.pyi`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "AsyncTidegate": "tidegate.client.async_client",
    "RetryPolicy": "tidegate.client.retry_policy",
    "Tidegate": "tidegate.client.sync_client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "httpx2":
            raise
        raise ImportError("the client needs httpx2: pip install 'tidegate[client]'", name=name) from error


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])

"""`Engine` is the interface of every model runtime: arrays in, arrays out, in this process, blocking.

Engines know nothing of requests, queues or wires. They live in worker processes, where blocking is fine and a crash
is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


class Engine(Protocol):
    def infer(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """All outputs by name, for inputs by name. Blocks. Raises EngineError."""
        ...

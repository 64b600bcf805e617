"""A byte limit breaks a connection at an exact byte, the same in every run, so that resumed uploads can be tested.

The first `size_bytes` of a direction pass; then the connection is closed cleanly, reset, or falls silent. What was sent
beyond is gone, as it is when a device drives into a tunnel in the middle of an upload.
"""

from __future__ import annotations

from typing import Literal

Then = Literal["close", "reset", "stall"]


class ByteLimit:
    """One direction of one connection. Mutable: counts down."""

    __slots__ = ("left_bytes", "then")

    def __init__(self, size_bytes: int, then: Then) -> None:
        self.left_bytes = size_bytes
        self.then: Then = then

    def take(self, size_bytes: int) -> int:
        """How many of these bytes pass. At 0 left the direction is over, whether more was sent or not."""
        passing = min(size_bytes, self.left_bytes)
        self.left_bytes -= passing
        return passing

    def __repr__(self) -> str:
        return f"<ByteLimit {self.left_bytes} bytes left, then {self.then}>"

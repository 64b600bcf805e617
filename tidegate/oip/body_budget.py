"""A memory budget for request bodies: how a body may come, and how much all bodies in progress may hold together.

Each body is within its limit, but a thousand of them are not. So large bodies are counted (`BodyMemory`), from the
first bytes until the answer is sent, over all protocols of a process; a body over the budget is refused as overloaded.
Small ones are bounded by their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from tidegate.outcome import Overloaded

SMALL_BYTES: Final = 64 * 1024  # up to this a body is not counted with the others


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Of one body, but for `max_held_bytes`, which is of all at once."""

    max_ratio: float = 100.0
    ratio_from_bytes: int = 2**20  # below it, nothing is worth refusing for its growth
    idle_s: float = 10.0
    grace_s: float = 30.0
    min_bytes_per_s: float = 16_384.0
    max_held_bytes: int = 2**29
    stall_s: float = 30.0  # of a streamed answer, not of a body: how long its caller may read nothing of it


DEFAULT: Final = BodyLimits()


class BodyMemory:
    """Mutable: the bytes of large bodies that are inside now. One per process, shared by its protocols."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0

    def share(self) -> BodyReservation:
        """One request's part, given back at the end of its `with`."""
        return BodyReservation(self)

    def __repr__(self) -> str:
        return f"<BodyMemory {self.bytes} of {self.max_bytes} bytes>"


class BodyReservation:
    """What one request holds of it."""

    __slots__ = ("_held", "bytes")

    def __init__(self, held: BodyMemory) -> None:
        self._held = held
        self.bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.bytes -= self.bytes
        self.bytes = 0

    def grow(self, to_bytes: int) -> None:
        """Raises Overloaded if all bodies together would hold too much."""
        more = to_bytes - self.bytes
        if to_bytes <= SMALL_BYTES or more <= 0:
            return
        if self._held.bytes + more > self._held.max_bytes:
            raise Overloaded(
                f"large requests hold {self._held.bytes} of {self._held.max_bytes} bytes (max_held_bytes)",
                retry_after_s=0.5,
            )
        self._held.bytes += more
        self.bytes = to_bytes

    def __repr__(self) -> str:
        return f"<BodyReservation {self.bytes} bytes of {self._held!r}>"

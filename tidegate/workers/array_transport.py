"""Which way the arrays of a call take: in memory that both ends share (`shared_memory.py`), or through the socket.

The same at both ends, parent and child: large payloads are written into a free segment, small ones follow their frame,
and so do those that find no segment free. From SHARE_FROM_BYTES on the segment is quicker (measured by
`tests/bench/handover.py`; below, both take what waking the other end takes).

A parent's segment is free again when its call is answered (`answered`), a child's when the parent says so (`freed`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Self

import msgspec

from tidegate.types import Buffer
from tidegate.workers import shared_memory
from tidegate.workers.channel import ArrayPayload, RunCompleted, RunEngine, pack_beside, pack_with, payload_bytes
from tidegate.workers.shared_memory import SOCKET, Incoming, Outgoing

SHARE_FROM_BYTES: Final = 1 << 16
INPUTS: Final = 2  # segments: one for the call that computes, and one for the next
OUTPUTS: Final = 4  # one written, one read, one whose freeing goes with the next call, and one to spare


class Handover:
    """Mutable: what lies in shared memory just now, at one end."""

    def __init__(self, outgoing: Outgoing, incoming: Incoming, *, share_from_bytes: int = SHARE_FROM_BYTES) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._share_from_bytes = share_from_bytes
        self._written: dict[int, int] = {}  # by call: the segment that its inputs are in

    @classmethod
    def to_child(cls, share_from_bytes: int) -> Self:
        """A parent's end, with segments of its own. Close it."""
        outgoing, incoming = Outgoing(shared_memory.create(INPUTS)), Incoming(shared_memory.create(OUTPUTS))
        return cls(outgoing, incoming, share_from_bytes=share_from_bytes)

    @classmethod
    def nothing(cls) -> Self:
        """Everything goes through the socket."""
        return cls(Outgoing([]), Incoming([]))

    @property
    def files(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the inputs' and the outputs' segments, as a parent has them."""
        return self._outgoing.files, self._incoming.files

    def frame(self, message: RunEngine | RunCompleted, laid: ArrayPayload) -> list[Buffer]:
        """The frame that takes these arrays to the other end. Raises FrameError: the header is too large."""
        if isinstance(message, RunEngine) and (freed := self._incoming.take_freed()):
            message = msgspec.structs.replace(message, freed=freed)
        if laid.size_bytes < self._share_from_bytes:
            return pack_with(message, laid)
        segment = self._outgoing.write(laid.parts, laid.size_bytes)
        if segment == SOCKET:
            return pack_with(message, laid)
        if isinstance(message, RunEngine):
            self._written[message.id] = segment
        return pack_beside(message, laid, segment)

    def payload(self, message: RunEngine | RunCompleted, followed: Buffer) -> Buffer:
        """Where a message's arrays are: in what followed it, or in its segment. Raises FrameError.

        Outputs lend their segment to whoever gets them. Inputs do not: the parent knows when a call is over.
        """
        if message.segment == SOCKET:
            return followed
        read = self._incoming.lend if isinstance(message, RunCompleted) else self._incoming.view
        return read(message.segment, payload_bytes(message.arrays))

    def answered(self, call_id: int) -> None:
        """The child reads the inputs of this call no more."""
        if (segment := self._written.pop(call_id, None)) is not None:
            self._outgoing.free(segment)

    def freed(self, numbers: Iterable[int]) -> None:
        """The parent reads these outputs no more."""
        for number in numbers:
            self._outgoing.free(number)

    def close(self) -> None:
        """Let go of all segments, but for outputs that somebody still reads."""
        self._outgoing.close()
        self._incoming.close()

    def __repr__(self) -> str:
        return f"<Handover {self._outgoing!r} {self._incoming!r}>"

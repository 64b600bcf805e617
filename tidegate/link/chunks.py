"""`ChunkAssembly` joins the chunks of large messages within a memory bound that the receiver sets.

A sender announces a size, then sends that many bytes in Chunk frames, with other frames between them. The receiver
counts the *announced* bytes of everything that is still incomplete, so a peer that announces much and sends nothing
is refused as early as one that sends it all. Nothing is allocated before it arrives.

The caller judges chunks of an id that is not open: they may belong to a message that it has just given up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tidegate.link.frames import ProtocolViolation
from tidegate.outcome import Overloaded, TooLarge

Head = TypeVar("Head")


@dataclass(slots=True)
class _Partial(Generic[Head]):
    head: Head
    announced_bytes: int
    received: bytearray = field(default_factory=bytearray)  # not a list of pieces: of one byte each they take 40


class ChunkAssembly(Generic[Head]):
    """The incomplete messages of one direction of one stream, each with the frame (`head`) that announced it."""

    def __init__(self, *, max_message_bytes: int, max_partial_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._max_partial_bytes = max_partial_bytes
        self._partials: dict[int, _Partial[Head]] = {}
        self._announced_bytes = 0

    def __repr__(self) -> str:
        return f"<ChunkAssembly {len(self._partials)} open, {self._announced_bytes} bytes announced>"

    def __len__(self) -> int:
        return len(self._partials)

    def __contains__(self, id: int) -> bool:
        return id in self._partials

    def open(self, id: int, head: Head, size_bytes: int) -> None:
        """Expect `size_bytes` for `id`.

        Raises:
            TooLarge: the size is over the limit of one message.
            Overloaded: the size is over what is left for all incomplete messages together.
            ProtocolViolation: the id is open already.
        """
        if id in self._partials:
            raise ProtocolViolation(f"message {id} announced twice")
        if size_bytes > self._max_message_bytes:
            raise TooLarge(f"a message of {size_bytes} bytes; at most {self._max_message_bytes} are taken")
        if self._announced_bytes + size_bytes > self._max_partial_bytes:
            raise Overloaded(f"{self._announced_bytes} bytes of other messages are still arriving", retry_after_s=0.1)
        self._partials[id] = _Partial(head, size_bytes)
        self._announced_bytes += size_bytes

    def add(self, id: int, piece: bytes) -> tuple[Head, bytes] | None:
        """The head and the whole message once its last piece is in, else None.

        Raises:
            ProtocolViolation: the piece does not fit the announced size.
            KeyError: the id is not open.
        """
        partial = self._partials[id]
        if not piece or len(partial.received) + len(piece) > partial.announced_bytes:
            raise ProtocolViolation(f"chunks of message {id} do not fit the {partial.announced_bytes} bytes announced")
        partial.received += piece
        if len(partial.received) < partial.announced_bytes:
            return None
        self.drop(id)
        return partial.head, bytes(partial.received)

    def drop(self, id: int) -> None:
        """Drop an incomplete message, if the id is open."""
        partial = self._partials.pop(id, None)
        if partial is not None:
            self._announced_bytes -= partial.announced_bytes

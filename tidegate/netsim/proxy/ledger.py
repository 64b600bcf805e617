"""The byte ledger of one direction of one connection: every byte received is delivered, held, or dropped for a reason.

    received = delivered + held + dropped, whatever happens       and, where none was dropped on the way,
    the checksum of what went in is that of what came out          so order and content are proven as well

Bytes are dropped only for these reasons:

    limit      beyond the byte at which the connection was to break
    nat        sent after the NAT had forgotten the connection
    cut        held when a reset or close was ordered
    gone       held for an end that has left
    shutdown   held when the link itself ended
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal
from zlib import crc32

Why = Literal["limit", "nat", "cut", "gone", "shutdown"]


class ByteLedger:
    """Mutable: `take` what comes in, `give` what goes out, `drop` what is lost and why; `error` if they disagree."""

    __slots__ = ("_crc_in", "_crc_out", "_lost_inside", "delivered", "dropped", "received")

    def __init__(self) -> None:
        self.received = 0
        self.delivered = 0
        self.dropped: Counter[Why] = Counter()
        self._crc_in = 0
        self._crc_out = 0
        self._lost_inside = False

    def take(self, piece: bytes | memoryview) -> None:
        self.received += len(piece)
        self._crc_in = crc32(piece, self._crc_in)

    def give(self, piece: bytes | memoryview) -> None:
        self.delivered += len(piece)
        self._crc_out = crc32(piece, self._crc_out)

    def refuse(self, size_bytes: int, why: Why) -> None:
        """These came and were not let in."""
        self.received += size_bytes
        self.dropped[why] += size_bytes

    def lose(self, size_bytes: int, why: Why) -> None:
        """These were let in and will not come out."""
        if size_bytes:
            self.dropped[why] += size_bytes
            self._lost_inside = True

    def error(self, held_bytes: int) -> str | None:
        """What is wrong with the books, given what is held now; None when they are right."""
        dropped = sum(self.dropped.values())
        if self.received != self.delivered + held_bytes + dropped:
            return f"{self.received} bytes in, but {self.delivered} out, {held_bytes} held and {dropped} dropped"
        if held_bytes == 0 and not self._lost_inside and self._crc_in != self._crc_out:
            return f"{self.delivered} bytes came out that are not the bytes that went in"
        return None

    def plain(self) -> dict[str, Any]:
        return {"received": self.received, "delivered": self.delivered, "dropped": dict(self.dropped.items())}

    def __repr__(self) -> str:
        return f"<ByteLedger {self.received} in, {self.delivered} out, {dict(self.dropped)}>"


class Totals:
    """The sum of many ledgers. Mutable."""

    __slots__ = ("delivered", "dropped", "received")

    def __init__(self) -> None:
        self.received = 0
        self.delivered = 0
        self.dropped: Counter[str] = Counter()

    def add(self, ledger: ByteLedger) -> None:
        self.received += ledger.received
        self.delivered += ledger.delivered
        self.dropped.update(ledger.dropped)

    def plain(self) -> dict[str, Any]:
        held = self.received - self.delivered - sum(self.dropped.values())
        return {
            "received": self.received,
            "delivered": self.delivered,
            "held": held,
            "dropped": {why: size for why, size in self.dropped.items() if size},
        }

    def __repr__(self) -> str:
        return f"<Totals {self.plain()}>"

"""The ledger of partial uploads bounds how many there are, and how many bytes, for each caller and for all.

An upload that is never completed would otherwise keep its bytes for ever, and a caller who begins one after another
would fill the disk that devices are served from. Each caller has half of the room, so that none takes it from the
others, and an upload that has not grown for `keep_s` is removed by the ledger's owner.

A partial upload that an earlier process left has no caller until one continues it: its bytes count for all meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

SHARE_OF_ONE = 2  # a caller has one part in so many of the room


class PartialBounds(NamedTuple):
    """Bounds of partial uploads: their number, their bytes, and seconds for which one may stand still."""

    most: int = 64
    most_bytes: int = 64 * 2**30
    keep_s: float = 86_400.0


DEFAULT = PartialBounds()


class PartialUpload(NamedTuple):
    caller: str
    size_bytes: int
    grown_at: float


class PartialLedger:
    """Which partial uploads there are. Mutable: one entry for each; the caller of each method owns the lock."""

    def __init__(self, bounds: PartialBounds) -> None:
        self.bounds = bounds
        self._held: dict[str, PartialUpload] = {}

    def put(self, digest: str, caller: str, size_bytes: int, now: float) -> None:
        """Note an upload's new size; it belongs to the caller who sent the last piece."""
        self._held[digest] = PartialUpload(caller, size_bytes, now)

    def drop(self, digest: str) -> None:
        self._held.pop(digest, None)

    def refusal(self, digest: str, caller: str, size_bytes: int) -> str | None:
        """Return why an upload may not grow to this size; None: it may."""
        others = [one for key, one in self._held.items() if key != digest]
        mine = [one for one in others if one.caller == caller]
        for held, whose, share in ((mine, "of this caller", SHARE_OF_ONE), (others, "in all", 1)):
            most, room = max(1, self.bounds.most // share), self.bounds.most_bytes // share
            if digest not in self._held and len(held) >= most:
                return f"{len(held)} unfinished uploads {whose}, at most {most}: finish one, {self._way_out()}"
            if sum(one.size_bytes for one in held) + size_bytes > room:
                return f"unfinished uploads {whose} would take more than {room} bytes: finish one, {self._way_out()}"
        return None

    def stale(self, now: float) -> Iterator[str]:
        """Yield the uploads that have not grown for `keep_s`."""
        for digest, one in tuple(self._held.items()):
            if now - one.grown_at >= self.bounds.keep_s:
                yield digest

    def _way_out(self) -> str:
        return "raise `artifacts.max_partials` or `artifacts.max_partial_bytes`, or wait: idle ones are removed"

    def __repr__(self) -> str:
        return f"<PartialLedger {len(self._held)} of {self.bounds.most}>"

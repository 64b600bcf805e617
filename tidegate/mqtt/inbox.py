"""The inbox holds messages that wait to be folded, bounded in number and in bytes.

Items of one key (messages of one topic with QoS 0) replace one another: only the newest waits, in the place of the
oldest; a device that floods its topic takes one place and costs its neighbours nothing. All else queues in order; when
the queue is full the oldest is dropped and counted. What is lost there heals like any other loss: by the next register,
or a resync.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

MAX_BYTES: Final = 64 * 2**20


class Inbox(Generic[ItemT]):
    """Mutable. `put` replaces an item of the same `key`; items without a key never replace each other."""

    __slots__ = ("_bytes", "_items", "_max_bytes", "_max_items", "_serial", "dropped", "replaced")

    def __init__(self, max_items: int, max_bytes: int = MAX_BYTES) -> None:
        self.dropped = 0
        self.replaced = 0
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: dict[str | int, tuple[ItemT, int]] = {}
        self._bytes = 0
        self._serial = 0

    def put(self, item: ItemT, key: str = "", size_bytes: int = 0) -> None:
        held = self._items.get(key) if key else None
        if held is not None:
            self.replaced += 1
            self._bytes -= held[1]
        elif len(self._items) >= self._max_items:
            self._drop_oldest()
        self._serial += 1
        self._items[key or self._serial] = item, size_bytes
        self._bytes += size_bytes
        while self._bytes > self._max_bytes and len(self._items) > 1:
            self._drop_oldest()

    def take(self, limit: int) -> list[ItemT]:
        """Up to `limit` items, oldest first; they are gone from here."""
        keys = [key for key, _ in zip(self._items, range(limit), strict=False)]
        return [self._out(key) for key in keys]

    def _drop_oldest(self) -> None:
        self.dropped += 1
        self._out(next(iter(self._items)))

    def _out(self, key: str | int) -> ItemT:
        item, size_bytes = self._items.pop(key)
        self._bytes -= size_bytes
        return item

    def __iter__(self) -> Iterator[ItemT]:
        """The items that wait, oldest first; they stay."""
        return (item for item, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return (
            f"<Inbox {len(self._items)}/{self._max_items}, {self._bytes} bytes, {self.dropped} dropped, "
            f"{self.replaced} replaced>"
        )

"""What has arrived and waits to be folded, bounded whatever arrives.

Heartbeats (QoS 0) replace one another: of each topic only the newest waits, in the place of the oldest; a device that
floods its topic takes one place and costs its neighbours nothing. All else queues in order; when the queue is full the
oldest is dropped and counted. What is lost there heals like any other loss: by the next register, or a resync.
"""

from __future__ import annotations

from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Inbox(Generic[ItemT]):
    """Mutable. `put` replaces an item of the same `key`; items without a key never replace each other."""

    __slots__ = ("_items", "_max_items", "_serial", "dropped", "replaced")

    def __init__(self, max_items: int) -> None:
        self.dropped = 0
        self.replaced = 0
        self._max_items = max_items
        self._items: dict[str | int, ItemT] = {}
        self._serial = 0

    def put(self, item: ItemT, key: str = "") -> None:
        if key and key in self._items:
            self.replaced += 1
        elif len(self._items) >= self._max_items:
            self.dropped += 1
            del self._items[next(iter(self._items))]
        self._serial += 1
        self._items[key or self._serial] = item

    def take(self, limit: int) -> list[ItemT]:
        """Up to `limit` items, oldest first; they are gone from here."""
        keys = [key for key, _ in zip(self._items, range(limit), strict=False)]
        return [self._items.pop(key) for key in keys]

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<Inbox {len(self._items)}/{self._max_items}, {self.dropped} dropped, {self.replaced} replaced>"

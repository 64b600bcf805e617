"""An indexed set puts, replaces and drops an item in O(1), and can be walked and indexed like a list.

The fleet's view keeps one for each model. With ten thousand devices coming up, one after another, an index that is
rebuilt for each is quadratic; a dictionary alone cannot be walked from the middle, which is how the shortlist samples.
Letting go moves the last item into the gap, so the order means nothing, but it is the same in every run.

Invariants: `items` holds each item that was put and not dropped, once; `get` finds exactly those.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class IndexedSet(Generic[Key, Item]):
    """Mutable: `put` and `drop` by key. Read `items`, and `keys` in the same order; never change them."""

    __slots__ = ("_places", "items", "keys")

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.keys: list[Key] = []
        self._places: dict[Key, int] = {}

    def put(self, key: Key, item: Item) -> None:
        """Take the item in, in place of the one of this key if there is one."""
        place = self._places.get(key)
        if place is not None:
            self.items[place] = item
            return
        self._places[key] = len(self.items)
        self.keys.append(key)
        self.items.append(item)

    def drop(self, key: Key) -> None:
        """Let the item of this key go, which must be there."""
        place, last_key, last = self._places.pop(key), self.keys.pop(), self.items.pop()
        if last_key != key:
            self._places[last_key] = place
            self.keys[place], self.items[place] = last_key, last

    def get(self, key: Key) -> Item | None:
        place = self._places.get(key)
        return None if place is None else self.items[place]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"<IndexedSet of {len(self.items)}>"

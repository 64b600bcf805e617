"""The deadline queue holds waiting items in order, and sums the predicted cost of all items before a key.

A batcher does the same few things for every request: insert it in its place, take one out, find the first, find the
infeasible ones, sum what waits before a key. With a plain sorted list each removal, each search and each sum walks
through all entries, so the busiest moment is also the slowest. Here no operation looks at more than a bounded number of
entries and a few sums.

Method: a sorted list cut into chunks of at most CHUNK entries, each with its last key and the sum of its seconds. A
place is found by two bisections; inserting moves at most one chunk's pointers; a sum takes whole chunks and part of
one. Infeasible entries are found by a heap of the instants at which each becomes infeasible; instants of entries that
left earlier are dropped from it as they come up, or all together once they are the majority.

Invariants: iteration is by key, then arrival, then number; sums and counts are those of the entries inside; the heap
holds at most SLACK more than twice the number of entries. Cost per operation: O(log n) comparisons, with n / CHUNK
numbers to be summed, which at a hundred thousand is less time than a Python call.

Source: chunked sorted lists as in Jenks, "Sorted Containers" (SciPy 2016); lazy deletion as in the standard library's
heapq documentation.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf

import msgspec

from cloud_pool.core.batching.queue_item import QueueItem
from tidegate.priority import level_of

CHUNK = 256
SLACK = 64

_Place = tuple[float, float, int]  # key, arrival, number


class QueueEntry(msgspec.Struct, frozen=True):  # one a request, as a `QueueItem` is
    """A waiting item with its place, its cost alone, and the instant at which it becomes infeasible."""

    item: QueueItem
    key: float
    alone_s: float
    infeasible_at: float
    delayed: bool = False  # it has lost its place (`queue_policy.py`)

    @property
    def place(self) -> _Place:
        return self.key, self.item.arrived_at, self.item.id


class DeadlineQueue:
    """Mutable: `add`, `take` by number, `take_infeasible`."""

    def __init__(self) -> None:
        self._entries: dict[int, QueueEntry] = {}
        self._chunks: list[list[tuple[_Place, QueueEntry]]] = []
        self._lasts: list[_Place] = []  # the place of the last entry of each chunk
        self._seconds: list[float] = []  # of each chunk
        self._levels = Counter[int]()
        self._infeasible: list[tuple[float, int]] = []  # a heap; may hold entries that left or have another instant now

    def add(self, entry: QueueEntry) -> None:
        """Insert an entry in its place. Its number must not be in the queue."""
        place = entry.place
        self._entries[entry.item.id] = entry
        self._levels[level_of(entry.item.priority)] += 1
        heappush(self._infeasible, (entry.infeasible_at, entry.item.id))
        if not self._chunks:
            self._chunks, self._lasts, self._seconds = [[(place, entry)]], [place], [entry.alone_s]
            return
        at = min(bisect_left(self._lasts, place), len(self._chunks) - 1)
        chunk = self._chunks[at]
        insort(chunk, (place, entry))
        self._lasts[at] = chunk[-1][0]
        self._seconds[at] += entry.alone_s
        if len(chunk) > CHUNK:
            self._split(at)

    def take(self, id: int) -> QueueEntry | None:
        """Take out the entry of this number; None if it is not in the queue."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return None
        self._levels[level_of(entry.item.priority)] -= 1
        place = entry.place
        at = bisect_left(self._lasts, place)
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, (place,))]
        if chunk:
            self._lasts[at] = chunk[-1][0]
            self._seconds[at] -= entry.alone_s
        else:
            del self._chunks[at], self._lasts[at], self._seconds[at]
        if len(self._infeasible) > 2 * len(self._entries) + SLACK:
            self._infeasible = [(inside.infeasible_at, id) for id, inside in self._entries.items()]
            heapify(self._infeasible)
        return entry

    def take_infeasible(self, now: float) -> list[QueueEntry]:
        """Take out all entries that are infeasible at `now`, in the order in which they became so."""
        infeasible = []
        while self._infeasible and self._infeasible[0][0] <= now:
            instant = heappop(self._infeasible)
            if self._is_current(instant) and (entry := self.take(instant[1])) is not None:
                infeasible.append(entry)
        return infeasible

    @property
    def next_infeasible_at(self) -> float | None:
        """When the next entry becomes infeasible; None when the queue is empty."""
        while self._infeasible and not self._is_current(self._infeasible[0]):
            heappop(self._infeasible)
        return self._infeasible[0][0] if self._infeasible else None

    @property
    def heap_size(self) -> int:
        """Instants in the heap, including those of entries that left; bounded by the invariant above."""
        return len(self._infeasible)

    @property
    def first(self) -> QueueEntry | None:
        return self._chunks[0][0][1] if self._chunks else None

    @property
    def last_key(self) -> float:
        """The key of the last entry in order; minus infinity when the queue is empty."""
        return self._lasts[-1][0] if self._lasts else -inf

    def at_level(self, priority: int) -> int:
        """How many entries of this level of priority wait."""
        return self._levels[level_of(priority)]

    @property
    def total_s(self) -> float:
        """Predicted seconds of all entries, each computed alone."""
        return sum(self._seconds, 0.0)

    def before(self, key: float) -> tuple[int, float]:
        """How many entries are before this key, and their predicted seconds, each computed alone."""
        at = bisect_left(self._lasts, (key,))
        if at == len(self._chunks):
            return len(self), self.total_s
        chunk = self._chunks[at]
        inside = bisect_left(chunk, ((key,),))
        count = sum(map(len, self._chunks[:at])) + inside
        before_s = sum(self._seconds[:at])
        if 2 * inside <= len(chunk):
            return count, before_s + sum([entry.alone_s for _, entry in chunk[:inside]])
        after_s = sum([entry.alone_s for _, entry in chunk[inside:]])  # most arrivals go to the end
        return count, before_s + max(0.0, self._seconds[at] - after_s)

    def __iter__(self) -> Iterator[QueueEntry]:
        for chunk in self._chunks:
            for _, entry in chunk:
                yield entry

    def __contains__(self, id: object) -> bool:
        return id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<DeadlineQueue {len(self)} in {len(self._chunks)} chunks, {self.total_s * 1e3:.0f} ms>"

    def _is_current(self, instant: tuple[float, int]) -> bool:
        """Whether the entry waits and becomes infeasible then: a readmitted one may have more time than before."""
        entry = self._entries.get(instant[1])
        return entry is not None and entry.infeasible_at == instant[0]

    def _split(self, at: int) -> None:
        chunk = self._chunks[at]
        halves = chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]
        self._chunks[at : at + 1] = halves
        self._lasts[at : at + 1] = [half[-1][0] for half in halves]
        # Summed afresh, so that rounding does not add up over the life of a chunk.
        self._seconds[at : at + 1] = [sum(entry.alone_s for _, entry in half) for half in halves]

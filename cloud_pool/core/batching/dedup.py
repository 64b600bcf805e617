"""Deduplication decides when a request may wait for the answer of another request with the same input.

The same bytes under the same names, types and shapes give the same answer from a model without randomness or state;
the manifest declares whether a model is of this kind (`batching.coalesce`). Only whole inputs are compared, by a
collision-resistant digest.

A request that is no more urgent than the one that waits may share its answer: the waiting one is due no later, at no
lower level of priority. All requests that share an answer are as urgent as the most urgent of them.

Source: request collapsing as in Varnish and nginx (`proxy_cache_lock`), without the cache; BLAKE2, RFC 7693.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from cloud_pool.core.batching.padding import Arrays
from tidegate.priority import level_of


@dataclass(frozen=True, slots=True)
class Urgency:
    """The deadline and the priority that decide a request's place."""

    deadline: float
    priority: int = 0

    def covers(self, other: Urgency) -> bool:
        """Whether a request of this urgency is served as soon as the other would have to be."""
        return self.deadline <= other.deadline and level_of(self.priority) <= level_of(other.priority)


def joint_urgency(all_of: Iterable[Urgency]) -> Urgency:
    """The earliest deadline and the highest level of at least one urgency."""
    urgencies = list(all_of)
    return Urgency(min(one.deadline for one in urgencies), min(level_of(one.priority) for one in urgencies))


def input_fingerprint(arrays: Arrays) -> bytes:
    """A digest that is equal for equal inputs, in any order of names, and for no others."""
    digest = blake2b(digest_size=32)
    for name, array in sorted(arrays.items()):
        content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        head = repr((name, array.dtype.str, array.shape, len(content)))
        digest.update(f"{len(head)}:{head}".encode())
        digest.update(content)
    return digest.digest()

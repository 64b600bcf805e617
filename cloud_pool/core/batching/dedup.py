"""Twins: requests with the same input. When may one wait for another's answer, and how urgent are all of them together?

The same bytes under the same names, types and shapes give the same answer from a model without chance or memory;
whether a model is such a one is its manifest's to say (`batching.coalesce`). Only whole inputs are compared, by a
digest that nobody can find a second input to.

Whoever is no more urgent than the one that waits may rely on it: no later deadline helps it, and no lower level. All of
them together are as urgent as the most urgent of them.

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
    """What decides about a request's place."""

    deadline: float
    priority: int = 0

    def covers(self, other: Urgency) -> bool:
        """Whether who is this urgent is served as soon as the other would have to be."""
        return self.deadline <= other.deadline and level_of(self.priority) <= level_of(other.priority)


def joint_urgency(all_of: Iterable[Urgency]) -> Urgency:
    """Of at least one: the earliest deadline and the highest level."""
    urgencies = list(all_of)
    return Urgency(min(one.deadline for one in urgencies), min(level_of(one.priority) for one in urgencies))


def input_fingerprint(arrays: Arrays) -> bytes:
    """Equal for equal inputs, in whatever order they are named, and for no others."""
    digest = blake2b(digest_size=32)
    for name, array in sorted(arrays.items()):
        content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        head = repr((name, array.dtype.str, array.shape, len(content)))
        digest.update(f"{len(head)}:{head}".encode())
        digest.update(content)
    return digest.digest()

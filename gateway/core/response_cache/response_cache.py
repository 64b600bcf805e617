"""The response cache keeps answers by the digest of their request, for a time and within a number of bytes.

Two bounds hold at once: of all answers together, and of each model's. Where either is exceeded the answer that was
asked for longest ago goes (least recently used): of the model where its own bound is exceeded, else of all. An answer
that alone is larger than a bound is not kept, so that one large answer cannot empty the cache.

An answer is fresh for its model's `ttl_s` from the moment at which it was kept; being asked for does not prolong it, or
a popular wrong answer would live for ever. For `stale_for_s` more it is the *last-known* answer, which is found only by
those who ask for such (`last_known`). Then it is dropped when it is asked for, or as the least recently used one:
nothing walks over the entries while requests come.

An answer may be kept as last-known alone, under the key of a series of requests: it is never fresh.

Invariants: the bytes held are the sum of the sizes of the entries and never exceed a bound; nothing is found at or
after its end, nor fresh at or after its `ttl_s`; nothing is found that was dropped. Pure.

Sizes are estimates: the tensors' contents, and `OVERHEAD_BYTES` for all that stands around them.

Source: NVIDIA Triton's response cache (exact match, LRU by bytes); the time to live is HTTP's (RFC 9111,
max-age), and last-known answers are its `stale-if-error` (RFC 5861).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import inf
from typing import Final, NamedTuple

import msgspec

from tidegate.types import InferResponse

OVERHEAD_BYTES: Final = 1024


class CacheLimits(NamedTuple):
    """How long answers of one model are kept, and in how many bytes."""

    ttl_s: float
    max_bytes: int
    stale_for_s: float = 0.0  # after that, as last-known answers


class KeptAnswer(msgspec.Struct, frozen=True):
    """An answer as it is kept: its tensors own their bytes."""

    response: InferResponse
    variant: str
    source: str  # the target that computed it
    model_mark: str  # a digest of the manifest by which it was computed


class _CacheEntry(NamedTuple):
    model: str
    answer: KeptAnswer
    size_bytes: int
    kept_at: float
    fresh_until: float
    ends_at: float


class LastKnown(NamedTuple):
    """A last-known answer, and how old it is."""

    answer: KeptAnswer
    age_s: float


class ResponseCache:
    """Mutable. Only models that have limits are kept.

    Args:
        max_bytes: of all models together.
    """

    def __init__(self, max_bytes: int, limits: Mapping[str, CacheLimits]) -> None:
        self.limits = limits
        self.held_bytes = 0
        self.evicted = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _CacheEntry] = OrderedDict()  # the one asked for last at the end
        self._of_model: dict[str, OrderedDict[bytes, None]] = {model: OrderedDict() for model in limits}
        self._bytes_of_model: dict[str, int] = dict.fromkeys(limits, 0)

    def find(self, key: bytes, now: float, max_age_s: float = inf) -> KeptAnswer | None:
        """The fresh answer to this request, where one is known that is younger than `max_age_s`."""
        entry = self._standing(key, now)
        if entry is None or now >= entry.fresh_until or now - entry.kept_at >= max_age_s:
            return None
        self._entries.move_to_end(key)
        self._of_model[entry.model].move_to_end(key)
        return entry.answer

    def last_known(self, key: bytes, now: float, max_age_s: float = inf) -> LastKnown | None:
        """The answer to this request, fresh or not, where one younger than `max_age_s` is known."""
        entry = self._standing(key, now)
        if entry is None or now - entry.kept_at >= max_age_s:
            return None
        return LastKnown(entry.answer, now - entry.kept_at)

    def _standing(self, key: bytes, now: float) -> _CacheEntry | None:
        entry = self._entries.get(key)
        if entry is not None and now >= entry.ends_at:
            self.drop(key)
            return None
        return entry

    def keep(self, key: bytes, model: str, answer: KeptAnswer, now: float, *, fresh: bool = True) -> bool:
        """Keep an answer instead of the one before it; False where it is too large, or its model has no limits.

        Args:
            fresh: False: it is a last-known answer from the beginning.
        """
        limits = self.limits.get(model)
        size = size_of(answer.response)
        if limits is None or size > min(limits.max_bytes, self._max_bytes):
            return False
        self.drop(key)
        while self._bytes_of_model[model] + size > limits.max_bytes:
            self._evict(next(iter(self._of_model[model])))
        while self.held_bytes + size > self._max_bytes:
            self._evict(next(iter(self._entries)))
        fresh_until = now + limits.ttl_s if fresh else now
        self._entries[key] = _CacheEntry(model, answer, size, now, fresh_until, fresh_until + limits.stale_for_s)
        self._of_model[model][key] = None
        self._bytes_of_model[model] += size
        self.held_bytes += size
        return True

    def drop(self, key: bytes) -> None:
        """Forget the answer to this request, if one is kept."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            del self._of_model[entry.model][key]
            self._bytes_of_model[entry.model] -= entry.size_bytes
            self.held_bytes -= entry.size_bytes

    def drop_where(self, model: str, wanted: Callable[[KeptAnswer], bool]) -> int:
        """Forget all answers of a model for which `wanted` is true; how many they were."""
        keys = [key for key in self._of_model.get(model, ()) if wanted(self._entries[key].answer)]
        for key in keys:
            self.drop(key)
        return len(keys)

    def of_model(self, model: str) -> tuple[int, int]:
        """How many answers of a model are kept, and their bytes."""
        return len(self._of_model.get(model, ())), self._bytes_of_model.get(model, 0)

    def _evict(self, key: bytes) -> None:
        self.drop(key)
        self.evicted += 1

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<ResponseCache {len(self)} answers, {self.held_bytes} of {self._max_bytes} bytes>"


def size_of(response: InferResponse) -> int:
    """Bytes that an answer holds, estimated."""
    said = sum([len(name) + len(str(value)) for name, value in response.parameters.items()])
    return OVERHEAD_BYTES + response.size_bytes + said

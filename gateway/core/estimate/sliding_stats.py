"""Sliding statistics count the requests of the last minute by a key: in time, late, failed, and their durations.

They serve displays of the present (the console, `tidegate top`); a scrape that keeps history reads Prometheus' counters
instead. Time is cut into slots of five seconds and a minute is twelve of them, so the oldest is forgotten as a whole
and reading is adding. Rates look at the last two whole slots and the one under way: some ten to fifteen seconds, since
what is asked is how it is *now*. Quantiles take the whole minute, as a p99 of ten seconds says little.

Durations are counted in buckets that grow by a tenth, so a quantile is off by five percent at most and a slot is a
small dict, whatever comes. Keys may be invented by callers (a model's name): beyond `MOST_KEYS` at once they share
the key `OTHERS`.

Invariants: what is read is at most `SLOTS` slots old; memory is bounded by MOST_KEYS * SLOTS * buckets; a record is
O(1); instants come in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from math import ceil, log
from typing import Final, Generic, Literal, NamedTuple, TypeVar, cast

from tidegate.estimate.quantiles import bins_at

SLOT_S: Final = 5.0
SLOTS: Final = 12
RATE_SLOTS: Final = 3  # the one under way, and the two whole ones before it
MOST_KEYS: Final = 4096
OTHERS: Final = "others"
QUANTILES: Final[tuple[float, ...]] = (0.5, 0.95, 0.99)
_LEAST_S: Final = 1e-4
_GROWTH: Final = 1.1
_STEP: Final = log(_GROWTH)
_LAST_BUCKET: Final = ceil(log(600.0 / _LEAST_S) / _STEP)  # ten minutes, and whatever takes longer
_BOUNDS_S: Final = tuple(_LEAST_S * _GROWTH**bucket for bucket in range(_LAST_BUCKET))

Ending = Literal["in_time", "late", "failed"]
K = TypeVar("K", bound=Hashable)


class WindowSummary(NamedTuple):
    """One key's last minute. Rates are a second's; a key without requests lately has zeros."""

    in_time: int
    late: int
    failed: int
    in_time_per_s: float
    per_s: float
    rated: int  # how many the rates are of
    late_share: float  # of those: late or failed
    quantiles_s: tuple[float, ...]  # of answers; empty where there were none

    @property
    def asked(self) -> int:
        return self.in_time + self.late + self.failed


class _Slot:
    __slots__ = ("buckets", "failed", "in_time", "late", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.in_time = self.late = self.failed = 0
        self.buckets: dict[int, int] = {}


class SlidingStats(Generic[K]):
    """Mutable: `record` each request's end, `read` a key, `items` for all that were lately asked for."""

    def __init__(self, *, slot_s: float = SLOT_S) -> None:
        self._slot_s = slot_s
        self._kept: dict[K, deque[_Slot]] = {}
        self._began_at: float | None = None
        self._full_at = -1  # the slot in which there was no room, although every old key was forgotten

    def record(self, key: K, ending: Ending, took_s: float, now: float) -> None:
        """A request came to its end. Its duration counts where it was answered."""
        self.count(key, ending, bucket_of(took_s), now)

    def count(self, key: K, ending: Ending, bucket: int, now: float, times: int = 1) -> None:
        """So many requests came to the same end within the slot of `now`. Args: bucket: of how long they took."""
        number = int(now / self._slot_s)
        slots = self._kept.get(key)
        if slots is None:
            slots = self._new(key, now)
        if not slots or slots[-1].number != number:
            slots.append(_Slot(number))
        slot = slots[-1]
        if ending == "failed":
            slot.failed += times
            return
        if ending == "in_time":
            slot.in_time += times
        else:
            slot.late += times
        slot.buckets[bucket] = slot.buckets.get(bucket, 0) + times

    def read(self, key: K, now: float) -> WindowSummary:
        return self._sum([self._kept.get(key, ())], now)

    def rates(self, now: float) -> dict[K, float]:
        """How many a second of every key that was lately asked for: a fraction of what `items` costs."""
        first, window_s = int(now / self._slot_s) - RATE_SLOTS + 1, self._window_s(now)
        found = {}
        for key, slots in self._kept.items():
            asked = 0
            for slot in reversed(slots):
                if slot.number < first:
                    break
                asked += slot.in_time + slot.late + slot.failed
            if asked:
                found[key] = asked / window_s
        return found

    def total(self, now: float) -> WindowSummary:
        """All keys together."""
        return self._sum(self._kept.values(), now)

    def items(self, now: float) -> Iterator[tuple[K, WindowSummary]]:
        """Every key of the last minute; keys without requests since are forgotten here."""
        self.forget(now)
        for key, slots in self._kept.items():
            yield key, self._sum([slots], now)

    def forget(self, now: float) -> None:
        """Forget the keys without requests in the last minute."""
        oldest = int(now / self._slot_s) - SLOTS
        for key in [key for key, slots in self._kept.items() if slots[-1].number <= oldest]:
            del self._kept[key]

    def _new(self, key: K, now: float) -> deque[_Slot]:
        if self._began_at is None:
            self._began_at = now
        if len(self._kept) >= MOST_KEYS and self._full_at != int(now / self._slot_s):
            self.forget(now)
            self._full_at = int(now / self._slot_s)
        if len(self._kept) >= MOST_KEYS:
            key = cast(K, OTHERS)
        return self._kept.setdefault(key, deque(maxlen=SLOTS))

    def _sum(self, kept: Iterable[Iterable[_Slot]], now: float) -> WindowSummary:
        current = int(now / self._slot_s)
        whole, rated = _Slot(current), _Slot(current)
        buckets: dict[int, int] = {}
        for slots in kept:
            for slot in slots:
                if slot.number <= current - SLOTS:
                    continue
                _add(whole, slot)
                if slot.number > current - RATE_SLOTS:
                    _add(rated, slot)
                for bucket, hits in slot.buckets.items():
                    buckets[bucket] = buckets.get(bucket, 0) + hits
        window_s = self._window_s(now)
        asked = rated.in_time + rated.late + rated.failed
        return WindowSummary(
            in_time=whole.in_time,
            late=whole.late,
            failed=whole.failed,
            in_time_per_s=rated.in_time / window_s,
            per_s=asked / window_s,
            rated=asked,
            late_share=(rated.late + rated.failed) / asked if asked else 0.0,
            quantiles_s=quantiles(buckets),
        )

    def _window_s(self, now: float) -> float:
        """What the rates are of; shorter only in the first seconds."""
        window_s = now - (int(now / self._slot_s) - RATE_SLOTS + 1) * self._slot_s
        since_s = window_s if self._began_at is None else now - self._began_at
        return max(1.0, min(window_s, since_s))

    def __repr__(self) -> str:
        return f"<SlidingStats {len(self._kept)} keys>"


def quantiles(buckets: Mapping[int, int], shares: tuple[float, ...] = QUANTILES) -> tuple[float, ...]:
    """Seconds that so many of the counted durations do not exceed, as the middle of their bucket."""
    return tuple([_LEAST_S * _GROWTH ** (bucket - 0.5) for bucket in bins_at(buckets, shares)])


def bucket_of(took_s: float) -> int:
    """0 holds what took up to a tenth of a millisecond; bucket i, what took up to _LEAST_S * 1.1^i."""
    return bisect_left(_BOUNDS_S, took_s)


def _add(sum_: _Slot, slot: _Slot) -> None:
    sum_.in_time += slot.in_time
    sum_.late += slot.late
    sum_.failed += slot.failed

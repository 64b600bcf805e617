"""A pool with more models than memory, simulated: which requests are late because their model was not there.

The decisions are the pool's own (`cloud_pool/core/memory/residency.py`); loads take their time on a virtual clock, one
after another. Plain LRU is beside it: whatever is asked for comes in, in the order of asking, and what was asked for
longest ago goes out. Computing and batching are left out, being the same for both.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import NamedTuple, Protocol

from cloud_pool.core.memory.residency import Residency


class ChurnModel(NamedTuple):
    """One model: bytes, seconds of a cold start, its callers' budget, and its share of the requests."""

    name: str
    size_bytes: float
    cold_s: float
    budget_s: float
    share: float


class ChurnRequest(NamedTuple):
    at: float
    model: str
    budget_s: float


@dataclass(frozen=True, slots=True)
class ChurnLoad:
    """What comes: models by Zipf's law, of unequal sizes, with callers in a hurry and callers with time.

    Args:
        zipf: the exponent of popularity.
        room_models: how many models of mean size there is memory for.
        shift_s: after so long the popularity moves to other models; inf: never.
    """

    models: int = 50
    room_models: float = 8.0
    zipf: float = 1.0
    rate_per_s: float = 20.0
    duration_s: float = 1800.0
    shift_s: float = 900.0
    budgets_s: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    bytes_per_s: float = 150e6
    start_s: float = 0.6  # of a worker's process, before the first byte is read

    def made(self, seed: int) -> tuple[list[ChurnModel], list[ChurnRequest]]:
        draws = random.Random(seed)
        weights = [1.0 / (rank + 1) ** self.zipf for rank in range(self.models)]
        draws.shuffle(weights)
        models = []
        for number, weight in enumerate(weights):
            size = 100e6 * draws.lognormvariate(0.0, 0.8)
            cold_s = self.start_s + size / self.bytes_per_s
            models.append(ChurnModel(f"m{number}", size, cold_s, draws.choice(self.budgets_s), weight / sum(weights)))
        return models, list(self._requests(models, draws))

    def _requests(self, models: Sequence[ChurnModel], draws: random.Random) -> Iterator[ChurnRequest]:
        shares, now, shifts = [one.share for one in models], 0.0, self.shift_s
        while now < self.duration_s:
            now += draws.expovariate(self.rate_per_s)
            if now >= shifts:
                shifts += self.shift_s
                shares = shares[7:] + shares[:7]
            (one,) = draws.choices(models, shares)
            yield ChurnRequest(now, one.name, one.budget_s * draws.uniform(0.7, 1.3))


@dataclass(slots=True)
class ChurnTally:
    """What became of the requests."""

    asked: int = 0
    cold: int = 0  # came while their model was not in memory
    missed: int = 0  # of these, late or refused
    loads: int = 0
    by_model: dict[str, int] = field(default_factory=dict)  # missed

    @property
    def missed_share(self) -> float:
        return self.missed / max(1, self.asked)


class ResidencyPolicy(Protocol):
    """Decides what comes in and goes out."""

    def asked(self, request: ChurnRequest) -> bool:
        """Whether the request waits for its model; False: it is turned away."""
        ...

    def next_in(self, now: float) -> tuple[str, Sequence[str]] | None:
        """The model that comes in now, and what goes out for it."""
        ...

    def came(self, name: str, now: float, took_s: float) -> None: ...


class ByValue:
    """The pool's own decisions."""

    def __init__(self, models: Sequence[ChurnModel], room_bytes: float) -> None:
        self.core = Residency(most_bytes=room_bytes)
        for one in models:
            self.core.know(one.name, size_bytes=one.size_bytes, cold_s=one.cold_s)

    def asked(self, request: ChurnRequest) -> bool:
        return self.core.ask(request.model, request.budget_s, request.at).verdict != "elsewhere"

    def next_in(self, now: float) -> tuple[str, Sequence[str]] | None:
        found = self.core.next_in(now)
        if found is not None:
            for victim in found[1]:
                self.core.evicted(victim)
            self.core.loading(found[0], now)
        return found

    def came(self, name: str, now: float, took_s: float) -> None:
        self.core.loaded(name, now, took_s=took_s)


class LeastRecentlyUsed:
    """Plain LRU: whatever is asked for comes in."""

    def __init__(self, models: Sequence[ChurnModel], room_bytes: float) -> None:
        self._sizes = {one.name: one.size_bytes for one in models}
        self._room = room_bytes
        self._used: dict[str, float] = {}  # of what is in memory: when it was asked for last
        self._queue: dict[str, None] = {}

    def asked(self, request: ChurnRequest) -> bool:
        if request.model in self._used:
            self._used[request.model] = request.at
        else:
            self._queue.setdefault(request.model)
        return True

    def next_in(self, now: float) -> tuple[str, Sequence[str]] | None:
        name = next(iter(self._queue), None)
        if name is None:
            return None
        victims, held = [], sum(self._sizes[one] for one in self._used)
        for one in sorted(self._used, key=self._used.__getitem__):
            if held + self._sizes[name] <= self._room:
                break
            held -= self._sizes[one]
            victims.append(one)
        for one in victims:
            del self._used[one]
        return name, victims

    def came(self, name: str, now: float, took_s: float) -> None:
        self._queue.pop(name)
        self._used[name] = now


def run_churn(
    models: Sequence[ChurnModel], requests: Sequence[ChurnRequest], policy: ResidencyPolicy, *, seed: int
) -> ChurnTally:
    """Play the requests through a policy. A load takes up to a fifth more or less than is expected of it."""
    draws, tally, here = random.Random(seed), ChurnTally(), set[str]()
    cold = {one.name: one.cold_s for one in models}
    waiting: dict[str, list[float]] = {}  # by model: deadlines
    order, events = count(), list[tuple[float, int, ChurnRequest | None]]()
    for one in requests:
        events.append((one.at, next(order), one))
    heapq.heapify(events)
    coming, began_at, ends_at = "", 0.0, inf

    def miss(name: str) -> None:
        tally.missed += 1
        tally.by_model[name] = tally.by_model.get(name, 0) + 1

    while events:
        now, _, request = heapq.heappop(events)
        if request is None and now == ends_at:
            policy.came(coming, now, now - began_at)
            here.add(coming)
            for deadline in waiting.pop(coming, []):
                if deadline < now:
                    miss(coming)
            coming, ends_at = "", inf
        elif request is not None:
            tally.asked += 1
            waits = policy.asked(request)
            if request.model not in here:
                tally.cold += 1
                if waits:
                    waiting.setdefault(request.model, []).append(request.at + request.budget_s)
                else:
                    miss(request.model)
        if not coming and (found := policy.next_in(now)) is not None:
            coming, victims = found
            here -= set(victims)
            began_at, ends_at = now, now + cold[coming] * draws.uniform(0.8, 1.2)
            tally.loads += 1
            heapq.heappush(events, (ends_at, next(order), None))
    for name, deadlines in waiting.items():
        for _ in deadlines:
            miss(name)
    return tally

"""Residency decides which models are in memory, where there are more of them than memory has room for.

Each model has a value: what its absence would cost a second, for each byte that it holds.

    value = demand × cost of a cold start / bytes
    demand            requests a second, each weighing half as much after HALF_LIFE_S
    cold start        its seconds, as measured, in the share of requests that could not have waited for it; callers with
                      budgets of minutes lose little by a cold start of seconds, so a small part counts for them

* **Room is made** by what has the least value; what was asked for longest ago goes first among equals. A model that is
  pinned (`warm: always`) never goes.
* **A model comes in where that pays** (`_gain`): the requests that wait for it, and what it will be asked for within
  HORIZON_S, against what those that go out for it would have been asked for. Of several, the one that brings most for
  each second of its load comes first; one comes in at a time, since loading takes the disk and a core, and a second
  load would make both late.
* **A request for a model that is not in memory** waits for it where it should come in within the request's budget
  (`ask`). Any other is refused at once, so that another target may answer; it counts as demand all the same.

Plain LRU loads whatever is asked for and lets go what was asked for longest ago. A request for a rare model then throws
out one that is asked for all the time, mostly to be late itself.

It can be wrong when demand moves faster than its half-life; the past then weighs against the new for minutes.

Source: Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms" (GreedyDual-Size), USITS 1997; Cherkasova, "Improving
WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Labs 1998. Here age is demand's half-life.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, log
from typing import Final, Literal, NamedTuple

HALF_LIFE_S: Final = 120.0
LEAST_SHARE: Final = 0.05  # of a cold start's cost, for a model whose callers can all wait for it
SAFETY: Final = 1.25  # times the expected wait that a budget must allow: loads differ
HORIZON_S: Final = 5.0  # for which demand is weighed against what waits now: about as long as a load and its eviction
LEAST_COLD_S: Final = 0.001
BACKLOG_GAIN: Final = 0.02  # of one request in the mean wait for other loads
BETTER: Final = 1.1  # times as much worth as what would go out: else models of equal worth would change places for ever

Verdict = Literal["here", "wait", "elsewhere"]


class ColdStart(NamedTuple):
    """What becomes of a request: its model is here, or it waits so long for it, or should go elsewhere."""

    verdict: Verdict
    wait_s: float = 0.0  # expected, from now


@dataclass(slots=True)
class ModelUse:
    """What is known of one model. `cold_s` is what a cold start takes, expected until it was measured."""

    name: str
    size_bytes: float
    cold_s: float
    pinned: bool = False
    resident: bool = False
    weight: float = 0.0  # of requests, decayed, at `seen_at`
    late_weight: float = 0.0  # of those of them that could not have waited for a cold start
    seen_at: float = 0.0
    loaded_at: float = -inf

    def asked(self, now: float, *, late: bool) -> None:
        kept = self._kept(now)
        self.weight = self.weight * kept + 1.0
        self.late_weight = self.late_weight * kept + float(late)
        self.seen_at = max(self.seen_at, now)

    def demand(self, now: float) -> float:
        """Requests a second."""
        return self.weight * self._kept(now) * log(2.0) / HALF_LIFE_S

    @property
    def late_share(self) -> float:
        """Of its requests, those that a cold start makes late."""
        return max(LEAST_SHARE, self.late_weight / self.weight) if self.weight > 0.0 else 1.0

    def late_demand(self, now: float) -> float:
        """Requests a second that are late while it is not in memory."""
        return self.demand(now) * self.late_share

    def worth(self, now: float) -> float:
        """What its absence costs in a second."""
        return self.demand(now) * self.cold_s * self.late_share

    def value(self, now: float) -> float:
        """Of each of its bytes."""
        return self.worth(now) / max(1.0, self.size_bytes)

    def _kept(self, now: float) -> float:
        return float(2.0 ** (-max(0.0, now - self.seen_at) / HALF_LIFE_S))


class Residency:
    """Mutable: `know` and `forget` models, tell what was `asked`, and what is `loading`, `loaded` and `evicted`.

    Args:
        most_bytes, most_models: what may be in memory at once; infinite where only the other one counts.
    """

    def __init__(self, *, most_bytes: float = inf, most_models: float = inf) -> None:
        self.evictions = 0
        self.cold_starts = 0
        self.turned_away = 0
        self._most_bytes = most_bytes
        self._most_models = most_models
        self._models: dict[str, ModelUse] = {}
        self._waiting: dict[str, list[float]] = {}  # by model that is not in memory: deadlines of those that wait
        self._coming: ModelUse | None = None  # what is loaded now, even where it was forgotten meanwhile, ...
        self._began_at = 0.0  # ... and since when
        self._backlog_s = 0.0  # that a cold start usually waits for others

    def know(self, name: str, *, size_bytes: float, cold_s: float, pinned: bool = False) -> None:
        """Take in a model; of one that is known only what is given changes."""
        known = self._models.get(name)
        if known is None:
            self._models[name] = ModelUse(name, size_bytes, cold_s, pinned)
        else:
            known.size_bytes, known.cold_s, known.pinned = size_bytes, cold_s, pinned

    def forget(self, name: str) -> None:
        """Know a model no longer. A load of it that is under way takes its time all the same, until `ended`."""
        self._models.pop(name, None)
        self._waiting.pop(name, None)

    def ask(self, name: str, budget_s: float, now: float) -> ColdStart:
        """Take note of a request, and decide what becomes of it. One that waits counts for its model from now on."""
        one = self._models[name]
        if one.resident:
            one.asked(now, late=budget_s < SAFETY * (one.cold_s + self._backlog_s))
            return ColdStart("here")
        wait_s = self.wait_s(name, now)
        self._backlog_s += BACKLOG_GAIN * (wait_s - one.cold_s - self._backlog_s)
        in_time = SAFETY * wait_s <= budget_s
        one.asked(now, late=not in_time)
        if in_time and (one is self._coming or self._gain(one, now, extra=1.0) > 0.0):
            still = [deadline for deadline in self._waiting.get(name, ()) if deadline >= now]
            self._waiting[name] = [*still, now + budget_s]
            return ColdStart("wait", wait_s)
        self.turned_away += 1
        return ColdStart("elsewhere", wait_s)

    def wait_s(self, name: str, now: float) -> float:
        """How long a cold start should take from now: the load under way, those that pay more, and its own."""
        one, left_s = self._models[name], self._left_s(now)
        if one is self._coming:
            return left_s
        pays = self._gain(one, now, extra=1.0) / one.cold_s
        waited = [self._models[other] for other in self._waiting]
        before = [other for other in waited if other is not one and other is not self._coming]
        return left_s + one.cold_s + sum(o.cold_s for o in before if self._gain(o, now) / o.cold_s > pays)

    def next_in(self, now: float) -> tuple[str, tuple[str, ...]] | None:
        """The model that should come in now, and what goes out for it; None where none pays, or one is coming in."""
        if self._coming is not None:
            return None
        absent = [one for one in self._models.values() if not one.resident and (one.weight > 0.0 or one.pinned)]
        gains = [(self._gain(one, now) / one.cold_s, one) for one in absent]
        best = max((entry for entry in gains if entry[0] > 0.0), key=lambda entry: entry[0], default=None)
        if best is None:
            return None
        victims = self._room(best[1], now)
        return None if victims is None else (best[1].name, victims)

    def room_for(self, name: str, now: float) -> tuple[str, ...] | None:
        """What goes out where a model must come in, whether that pays or not; None where there is no room at all."""
        return self._room(self._models[name], now)

    def fits(self, size_bytes: float) -> bool:
        """Whether one more model of this size may be in memory without another going out."""
        resident = [other.size_bytes for other in self._models.values() if other.resident]
        return sum(resident) + size_bytes <= self._most_bytes and len(resident) + 1 <= self._most_models

    def loading(self, name: str, now: float) -> None:
        """Take note that a model begins to come in."""
        self._coming, self._began_at = self._models[name], now

    def loaded(self, name: str, now: float, *, size_bytes: float | None = None, took_s: float | None = None) -> None:
        """Take note that a model is in memory, with what it holds and what that took."""
        one = self._models[name]
        one.resident, one.loaded_at = True, now
        one.size_bytes = one.size_bytes if size_bytes is None else size_bytes
        one.cold_s = one.cold_s if took_s is None else max(LEAST_COLD_S, took_s)
        self.cold_starts += 1
        self._settled(name)

    def failed(self, name: str) -> None:
        """Take note that a model did not come in: it is as good as not asked for."""
        self._models[name].weight = self._models[name].late_weight = 0.0
        self._settled(name)

    def ended(self) -> None:
        """Take note that the load under way has ended, whatever came of it."""
        self._coming = None

    def evicted(self, name: str) -> None:
        self._models[name].resident = False
        self.evictions += 1

    def _settled(self, name: str) -> None:
        self._waiting.pop(name, None)
        if self._coming is self._models[name]:
            self._coming = None

    def _left_s(self, now: float) -> float:
        """Of the load under way."""
        if self._coming is None:
            return 0.0
        took_s, cold_s = now - self._began_at, self._coming.cold_s
        return cold_s - took_s if took_s <= cold_s else took_s  # one that is overdue is half way, for all that shows

    def _gain(self, one: ModelUse, now: float, *, extra: float = 0.0) -> float:
        """Requests in time that a model brings when it comes in, less those that what goes out for it would have had.

        Args:
            extra: requests that would wait for it as well.
        """
        victims = self._room(one, now)
        if victims is None:
            return 0.0
        if one.pinned:
            return inf
        soonest = now + SAFETY * one.cold_s
        waits = extra + sum(deadline >= soonest for deadline in self._waiting.get(one.name, ()))
        lost = sum(self._models[name].late_demand(now) for name in victims)
        return waits + HORIZON_S * (one.late_demand(now) - BETTER * lost)

    def _room(self, one: ModelUse, now: float) -> tuple[str, ...] | None:
        """What must go out for it, the least valuable, least recently asked first; None where that is not enough."""
        resident = [other for other in self._models.values() if other.resident]
        over_bytes = sum(other.size_bytes for other in resident) + one.size_bytes - self._most_bytes
        over_models = len(resident) + 1 - self._most_models
        if over_bytes <= 0.0 and over_models <= 0.0:
            return ()
        victims = list[ModelUse]()
        spare = [other for other in resident if not other.pinned]
        for other in sorted(spare, key=lambda other: (other.value(now), other.seen_at)):
            victims.append(other)
            over_bytes -= other.size_bytes
            over_models -= 1
            if over_bytes <= 0.0 and over_models <= 0.0:
                return tuple(other.name for other in _needed(victims, -over_bytes, -over_models))
        return None

    def __iter__(self) -> Iterator[ModelUse]:
        return iter(self._models.values())

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def __getitem__(self, name: str) -> ModelUse:
        return self._models[name]

    def __repr__(self) -> str:
        here = sum(one.resident for one in self)
        return f"<Residency {here} of {len(self._models)} in memory, {len(self._waiting)} waited for>"


def _needed(victims: list[ModelUse], spare_bytes: float, spare_models: float) -> list[ModelUse]:
    """The victims without those that need not go out after all, since a larger one behind them does; dearest first."""
    kept = list(victims)
    for one in reversed(victims):
        if one.size_bytes <= spare_bytes and spare_models >= 1.0:
            kept.remove(one)
            spare_bytes -= one.size_bytes
            spare_models -= 1.0
    return kept

"""The shortlist is the bounded sample of offers that a decision looks at in a large fleet.

Up to `LOOK_AT_ALL` offers a decision weighs every one. Beyond, its cost must not grow with the fleet, and it need not:
among thousands of devices many would do equally well, and what matters is to see those that are idle and fast, every
pool (there are few, and they take what no edge can), and a fair sample of the rest so that none is forgotten.

    sample     16 that come next in the rotation                      every offer's turn comes, whatever is known of it
    idle       6 of the fastest that were idle when last seen         they are idle still, or are passed over
    fastest    the 2 fastest that are known, busy or not              the best in their place, and the ground of a proof
    pools      up to 8; of more, 8 that come next in their rotation

The rotation goes by the golden ratio of the list's length, made coprime to it: neighbours in the list came up together
and are much alike, and 16 of a kind would be no sample. Idle ones are kept by speed, in classes a fifth wide, as the
sample comes across them. One that was taken meanwhile, or is gone, is dropped when its turn comes, and found again by
the sample once it is idle: so launches and answers pay nothing for this index.

The refusal of a request as infeasible is a proof over the offers that were looked at. It holds for the fleet as far as
the fastest at the usual size of requests are the fastest at this size too.

It can be wrong while almost all are busy: then the sample is all there is, and its best of 16 stands for the best of
all. Which targets are idle is only this gateway's own view: other gateways' launches show in reports.

Invariants: never more than MOST; never twice the same; of `LOOK_AT_ALL` or fewer, all. No chance is involved. O(MOST).
Source: docs/design/routing.md, "Large fleets" (the pool of 16 and the best two); Wydrowski et al., "Load is not what
you should balance: Introducing Prequal", NSDI 2024.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import gcd, log
from typing import Final

from gateway.core.fleet.offer_index import Offer, OfferIndex

LOOK_AT_ALL: Final = 32
SAMPLE: Final = 16
IDLE: Final = 6
FASTEST: Final = 2
POOLS: Final = 8
MOST: Final = SAMPLE + IDLE + FASTEST + POOLS
_GOLDEN: Final = 0.6180339887498949
_CLASS: Final = 0.2  # of a logarithm: offers this much alike in speed are one class
_FIRST_S: Final = 1e-4
_CLASSES: Final = 64  # up to half a minute
_USUAL_WEIGHT: Final = 0.05
_MOST_MODELS: Final = 256


Key = tuple[str, str]  # target, variant


class Rotation:
    """Mutable: goes through the places 0 … n − 1, each once in n steps, while n may change at any time."""

    __slots__ = ("_place", "_size", "_step")

    def __init__(self) -> None:
        self._place = 0
        self._size = 0
        self._step = 1

    def next(self, count: int, size: int) -> list[int]:
        """The next `count` places of a list of `size`; all of them if there are no more."""
        if size != self._size:
            self._turn(size)
        place, step, places = self._place, self._step, []
        for _ in range(min(count, size)):
            place += step
            if place >= size:
                place -= size
            places.append(place)
        self._place = place
        return places

    def _turn(self, size: int) -> None:
        step = max(1, int(_GOLDEN * size))
        while gcd(step, size) > 1:
            step += 1
        self._size, self._step, self._place = size, step % max(1, size), self._place % max(1, size)

    def __repr__(self) -> str:
        return f"<Rotation at {self._place} of {self._size}, by {self._step}>"


class _ModelShortlist:
    """Mutable: what is remembered of the offers of one model, by their keys: what goes and comes back is the same."""

    __slots__ = ("_classes", "_fastest", "_idle", "_rotation", "_rotation_of_pools", "_usual_units")

    def __init__(self) -> None:
        self._rotation = Rotation()
        self._rotation_of_pools = Rotation()
        self._usual_units = 0.0  # of requests, as a moving average: speeds are compared at this size
        self._forget()

    def _forget(self) -> None:
        self._classes: list[deque[Key]] = [deque() for _ in range(_CLASSES)]
        self._idle: set[Key] = set()  # those in `_classes`
        self._fastest: list[tuple[float, Key]] = []  # (unloaded seconds, key)

    def shortlist(self, offers: OfferIndex, units: float) -> list[Offer]:
        self._usual_units += (_USUAL_WEIGHT if self._usual_units else 1.0) * (units - self._usual_units)
        keys, items, pools = offers.all.keys, offers.all.items, offers.pools
        if len(self._idle) > 2 * len(keys):
            self._forget()  # most are of targets that are gone for good
        chosen: dict[Key, Offer] = {}
        for turn, place in enumerate(self._rotation.next(SAMPLE, len(items))):
            key, one = keys[place], items[place]
            chosen[key] = one
            is_news = key not in self._idle and _is_idle(one)
            if (is_news or turn == 0) and one.target.spec.tier == "edge":
                self._learn(key, one, is_idle=is_news)
        for place in self._rotation_of_pools.next(POOLS, len(pools)):
            chosen[pools.keys[place]] = pools.items[place]
        self._add_fastest(chosen, offers)
        self._add_idle(chosen, offers)
        return list(chosen.values())

    def _learn(self, key: Key, one: Offer, *, is_idle: bool) -> None:
        unloaded_s = one.target.link.rtt_s + one.cost.predict_s(self._usual_units)
        fastest = self._fastest
        if len(fastest) < FASTEST or unloaded_s < fastest[-1][0]:
            others = [entry for entry in fastest if entry[1] != key]
            self._fastest = sorted([*others, (unloaded_s, key)])[:FASTEST]
        if is_idle:
            self._idle.add(key)
            self._classes[_class_of(unloaded_s)].append(key)

    def _add_fastest(self, chosen: dict[Key, Offer], offers: OfferIndex) -> None:
        for entry in tuple(self._fastest):
            one = offers.all.get(entry[1])
            if one is None:
                self._fastest.remove(entry)
            else:
                chosen[entry[1]] = one

    def _add_idle(self, chosen: dict[Key, Offer], offers: OfferIndex) -> None:
        """Add the next of the fastest idle ones, looking at no more than twice as many as may be added."""
        looks, left = 2 * IDLE, IDLE
        for members in self._classes:
            for _ in range(min(len(members), looks)):
                looks -= 1
                key = members.popleft()
                one = offers.all.get(key)
                if one is None or not _is_idle(one):
                    self._idle.discard(key)
                    continue
                members.append(key)
                chosen[key] = one
                left -= 1
                if not left:
                    return
            if not looks:
                return

    def __repr__(self) -> str:
        return f"<_ModelShortlist {len(self._idle)} idle, {self._rotation!r}>"


class Shortlist:
    """Mutable: one for each placer."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _ModelShortlist] = {}

    def of(self, model: str, version: str, offers: OfferIndex, units: float) -> Sequence[Offer]:
        """The offers to look at, for a request of this size."""
        if len(offers.all.items) <= LOOK_AT_ALL:
            return offers.all.items
        known = self._known.get((model, version))
        if known is None:
            if len(self._known) >= _MOST_MODELS:  # most are versions that are gone; what is lost is soon learned again
                self._known.clear()
            known = self._known[model, version] = _ModelShortlist()
        return known.shortlist(offers, units)

    def __repr__(self) -> str:
        return f"<Shortlist {self._known}>"


def _is_idle(one: Offer) -> bool:
    queue_estimate = one.target.queue_estimate
    if queue_estimate.in_flight:
        return False
    load = queue_estimate.load
    return load is None or not (load.queued or load.in_flight)


def _class_of(unloaded_s: float) -> int:
    return min(_CLASSES - 1, max(0, int(log(max(unloaded_s, _FIRST_S) / _FIRST_S) / _CLASS)))

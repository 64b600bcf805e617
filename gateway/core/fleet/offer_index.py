"""An offer is a variant of a model on a target, with its cost; an offer index holds all offers of one model.

Placement walks `OfferIndex.all` for every request, so they are kept as it reads them (`indexed_set.py`), and changed
one by one.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.core.estimate.service_cost import VariantCost
from gateway.core.fleet.indexed_set import IndexedSet
from gateway.core.fleet.target import TargetView
from tidegate.fleet.offers import VariantOffer
from tidegate.placement_pin import Zone


class Offer(NamedTuple):
    """One way to answer one model: a variant on a usable target, with its cost."""

    target: TargetView
    model: str
    version: str
    variant: VariantOffer
    cost: VariantCost
    quality: float = 1.0
    zone: Zone = "cloud"
    cold_s: float = 0.0  # until its model is in memory there, if it is asked for now

    @property
    def price(self) -> float:
        return self.target.price


class OfferIndex:
    """All offers of one model by (target, variant), and those of pools once more. Mutable: the fleet keeps it up."""

    __slots__ = ("all", "pools")

    def __init__(self) -> None:
        self.all: IndexedSet[tuple[str, str], Offer] = IndexedSet()
        self.pools: IndexedSet[tuple[str, str], Offer] = IndexedSet()

    def put(self, key: tuple[str, str], one: Offer) -> None:
        self.all.put(key, one)
        if one.target.spec.tier == "pool":
            self.pools.put(key, one)

    def drop(self, key: tuple[str, str]) -> None:
        self.all.drop(key)
        if self.pools.get(key) is not None:
            self.pools.drop(key)

    def __repr__(self) -> str:
        return f"<OfferIndex {len(self.all)}, {len(self.pools)} of pools>"

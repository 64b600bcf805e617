"""Where many gateways share the targets, each decision looks at a few that chance chose.

Gateways that see one idle target all send to it before the first of them hears of the others' work: a herd. Up to some
ten gateways, each of which hears of the others' work within a hundredth of a second (`tidegate/link/service.py`), it
costs less to look at all targets than to leave most of them out. Beyond, the best of a few at random is better: then
gateways look at different targets, and the best of them is rarely the best for another one too.

    4 edges at random, and 4 pools        of fewer, all
    none of them would be in time         all are looked at, as for a gateway alone: a few prove nothing about the rest

Simulated with twenty equal targets at four fifths of what they can do, answers in time of 16 gateways over those of
one that sees all: docs/design/routing.md, "Several gateways".
Source: Mitzenmacher, "How useful is old information?", IEEE TPDS 2000 (the best of two or three at random under stale
load).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.core.fleet.indexed_set import IndexedSet
from gateway.core.fleet.offer_index import Offer, OfferIndex

FROM_GATEWAYS: Final = 12
OF_EACH: Final = 4
_TRIES: Final = 4 * OF_EACH  # for so many different ones, or edges among pools


def sample(offers: OfferIndex, draw: Callable[[], float]) -> list[Offer]:
    """Some of the offers. Args: draw: chance, uniform in [0, 1)."""
    edges = len(offers.all.items) - len(offers.pools.items)
    chosen = _some(offers.pools, draw)
    if edges <= OF_EACH:
        return [*chosen, *(one for one in offers.all.items if one.target.spec.tier == "edge")] if edges else chosen
    return [*chosen, *(one for one in _some(offers.all, draw) if one.target.spec.tier == "edge")]


def _some(offers: IndexedSet[tuple[str, str], Offer], draw: Callable[[], float]) -> list[Offer]:
    items = offers.items
    if len(items) <= OF_EACH:
        return list(items)
    places: dict[int, None] = {}
    for _ in range(_TRIES):
        places[int(draw() * len(items))] = None
        if len(places) == OF_EACH:
            break
    return [items[place] for place in places]

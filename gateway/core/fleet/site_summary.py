"""A site summary tells an upstream gateway about a whole site: each model's best cost, its soonest place, its capacity.

An upstream gateway sees a site as one target (docs/sites.md). What it has to know of three hundred devices to place a
request well is little, since the site places the request once more, by what it knows itself:

    cost      the table of the fastest place that has the variant now, with the way to it
    wait_s    of the place that would be done soonest: min(wait + compute) − compute of the fastest
    places    capacity: Σ compute of the fastest / work that one request adds here     (a batcher counts for several;
              of a generating variant, whose slots are told apart, each machine counts by its speed)
    price     of a second at the cheapest place
    zone      the innermost one that has it, so that pinned requests are sent only where they can be answered
    slots     of a generating variant: those of all places together

Only the site's own places count, never another site: what an upstream gateway sends is not sent on to a third one, so
no capacity is counted twice, and no offer comes back to the gateway that it came from.

A summary walks at most `MOST` offers of a model, which take turns, and scales what it counts: its cost does not grow
with the site. Numbers are rounded, so that a site at rest says the same each second and its offers are not sent again.

It can be wrong for `SUMMARY_S`; the wait of the soonest place, of all models, is also told with each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from math import floor, log10
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec.structs import replace

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.offer_index import Offer
from tidegate.estimate.cost_table import CostTable
from tidegate.fleet.offers import MOST_PLACES, Grade, ModelOffer, VariantOffer
from tidegate.placement_pin import Zone
from tidegate.types import LoadReport

SUMMARY_S: Final = 1.0  # between two summaries at least
LOAD_S: Final = 0.1  # between two looks at the queues at least, for what answers say of the load
MOST: Final = 256  # offers of a model that one summary walks
_LEAST_SHARE: Final = 0.05  # of a batch's compute that one more request in it adds at least, as in placement
_INNERMOST: Final[tuple[Zone, ...]] = ("edge", "site", "cloud")
_LONGEST_S: Final = 3600.0
_WAIT_STEP_S: Final = 0.001
_ABOUT: Final = 1.25

Table = tuple[tuple[float, float], ...]  # (work units, seconds)
Tables = Mapping[tuple[str, str, str], Table]  # by model, version and variant
_NO_TABLES: Final[Tables] = MappingProxyType({})


class _SitePlace(NamedTuple):
    """One offer of the site, with its predictions for a request of the usual size."""

    offered: Offer
    compute_s: float
    wait_s: float
    work_s: float  # what one more request adds to the wait of those behind it
    way_s: float  # the round trip


class _Variant(NamedTuple):
    """All that the site has of one variant of a model."""

    offer: VariantOffer
    wait_s: float  # until the soonest place begins, compared with the fastest


class SiteState(NamedTuple):
    """What a site says of itself at one instant."""

    offers: tuple[ModelOffer, ...]
    queue_delay_s: float  # of the variant with the shortest wait
    places: float  # of the variant that has most


def summarise(fleet: Fleet, now: float, turn: int = 0, told: Tables = _NO_TABLES) -> SiteState:
    """The state of the site now.

    Args:
        turn: counts summaries: of more than `MOST` offers others take their turn.
        told: the tables of the last summary, which are told again while they are about right.
    """
    found: dict[tuple[str, str], list[_Variant]] = {}
    for key, offers in fleet.indexes():
        known = list(_variants(key, _some(offers.all.items, turn), now, of=len(offers.all), told=told))
        if known:
            found[key] = known
    every = [one for variants in found.values() for one in variants]
    soonest_s = min([one.wait_s for one in every], default=0.0)
    models = tuple(
        ModelOffer(model, version, tuple(_beyond(one, soonest_s) for one in variants))
        for (model, version), variants in sorted(found.items())
    )
    return SiteState(models, soonest_s, max([one.offer.places for one in every], default=0.0))


class SiteSummary:
    """Mutable: the summary as it is told, made anew no more often than is worth it.

    Args:
        epoch: the number of this process's session, larger than that of the session before.
        in_flight: how many requests are under way in the site, of upstream gateways and of its own callers.
    """

    def __init__(self, fleet: Fleet, epoch: int, in_flight: Callable[[], int]) -> None:
        self.epoch = epoch
        self._fleet = fleet
        self._in_flight = in_flight
        self._sequence = count(1)
        self._turns = count()
        self._tables: Tables = _NO_TABLES
        self._told = self._seen = SiteState((), 0.0, 0.0)
        self._told_at = self._seen_at = -SUMMARY_S

    def offers(self, now: float) -> tuple[ModelOffer, ...]:
        """The models of the site, by a summary of the last second."""
        # A tick may come a little early. At its start a site has nothing yet, and each look may find the first.
        if now - self._told_at >= SUMMARY_S - LOAD_S or not self._told.offers:
            self._told, self._told_at = self._look(now), now
            self._tables = {
                (model.name, model.version, one.name): one.cost for model in self._told.offers for one in model.variants
            }
        return self._told.offers

    def load(self, now: float) -> LoadReport:
        """How busy the site is."""
        if now - self._seen_at >= LOAD_S:
            self._look(now)
        state, under_way = self._seen, self._in_flight()
        computing = min(under_way, int(state.places))
        return LoadReport(self.epoch, next(self._sequence), under_way - computing, computing, state.queue_delay_s)

    def _look(self, now: float) -> SiteState:
        self._seen, self._seen_at = summarise(self._fleet, now, next(self._turns), self._tables), now
        return self._seen

    def __repr__(self) -> str:
        return f"<SiteSummary of {len(self._told.offers)} models, {self._seen.places:.0f} places>"


def _some(offers: list[Offer], turn: int) -> list[Offer]:
    """At most `MOST` of them, spread over the list; every one has its turn."""
    if len(offers) <= MOST:
        return offers
    step = -(-len(offers) // MOST)
    return offers[turn % step :: step]


def _variants(model: tuple[str, str], offers: list[Offer], now: float, *, of: int, told: Tables) -> Iterator[_Variant]:
    groups: dict[str, list[Offer]] = {}
    for one in offers:
        if one.target.spec.tier != "site" and one.target.takes(now):
            groups.setdefault(one.variant.name, []).append(one)
    for name, group in groups.items():
        yield _variant(group, of / len(offers), now, told.get((*model, name), ()))


def _variant(group: list[Offer], times: float, now: float, told: Table) -> _Variant:
    units = _usual_units(group[0].variant)
    places = [_place(one, units, now) for one in group]
    fastest = min(places, key=lambda one: one.way_s + one.compute_s)
    best_s = fastest.way_s + fastest.compute_s
    wait_s = max(0.0, min(one.wait_s + one.way_s + one.compute_s for one in places) - best_s)
    capacity = sum(best_s / max(one.work_s, 1e-6) for one in places)
    variants = [one.variant for one in group]
    zone = min((one.zone for one in group), key=_INNERMOST.index)
    offer = VariantOffer(
        variants[0].name,
        variants[0].precision,
        _table(fastest, units, told),
        _most([one.max_batch for one in variants]),
        _most([one.max_tokens for one in variants]),
        variants[0].quality,
        paced=variants[0].paced,
        slots=round(times * sum(one.slots for one in variants)),
        schemas=any(one.schemas for one in variants),
        grade=_best_grade([one.grade for one in variants]),
        places=min(MOST_PLACES, max(1.0, _rounded(times * capacity))),
        price=_rounded(min(one.target.price for one in group)),
        zone=zone,
    )
    return _Variant(offer, min(wait_s, _LONGEST_S))


def _table(fastest: _SitePlace, units: float, told: Table) -> Table:
    """The table of the fastest place with the way there; the one told before while it is about right.

    An upstream gateway learns how far a table is off, and begins anew with another one.
    """
    table = tuple((at, _rounded(seconds + fastest.way_s)) for at, seconds in fastest.offered.variant.cost)
    if not told or not table:
        return table
    before_s, now_s = CostTable(told).seconds_for(units), CostTable(table).seconds_for(units)
    return told if now_s / _ABOUT <= before_s <= now_s * _ABOUT else table


def _place(one: Offer, units: float, now: float) -> _SitePlace:
    target, compute_s = one.target, one.cost.predict_s(units)
    work_s = compute_s
    if not one.variant.slots and target.queue_estimate.batches:
        work_s = max(compute_s - one.cost.call_s(), _LEAST_SHARE * compute_s)
    return _SitePlace(one, compute_s, target.wait_s(now), work_s, target.link.rtt_s)


def _beyond(one: _Variant, soonest_s: float) -> VariantOffer:
    """The variant's offer, with its wait beyond the site's soonest."""
    steps = round((one.wait_s - soonest_s) / _WAIT_STEP_S)
    return replace(one.offer, wait_s=_rounded(steps * _WAIT_STEP_S)) if steps else one.offer


def _usual_units(variant: VariantOffer) -> float:
    """The size of request at which places are compared: the middle of what was measured."""
    return variant.cost[len(variant.cost) // 2][0] if variant.cost else 1.0


def _most(bounds: list[int | None]) -> int | None:
    """The largest that any place takes; None where one takes any."""
    known = [one for one in bounds if one is not None]
    return max(known) if len(known) == len(bounds) else None


def _best_grade(grades: list[Grade]) -> Grade:
    order: tuple[Grade, ...] = ("ids", "prefill", "text")
    return min(grades, key=order.index)


def _rounded(number: float) -> float:
    """To two digits: what changes by less is not worth telling."""
    if not number > 0.0:
        return 0.0
    digits = 1 - floor(log10(number))
    return round(number, digits)

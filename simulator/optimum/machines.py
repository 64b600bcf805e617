"""Lower bounds on the time that a request takes of a worker, and the time that the worker has.

An edge computes one request at a time: its table × its own luck × how slow the device is when it starts, all of which
are known. A computation that began before an episode of heat goes on at full speed in it, so a slot within an episode
counts as slow only for requests that cannot have begun before it.

A pool computes batches, and what one member takes depends on its batch-mates. Let a + b · units lie nowhere above the
table. A batch of n rows, padded to the length L, then takes at least n · (a / n + b · L), and n is neither above
`max_batch` nor above the rows that can be in one batch at all: the rows no longer than L that could start in the same
moment. So each row may be charged

    the least of  a / n(t, L) + b · L   over the moments t at which its request could start and all L ≥ its own length

and a batch is never charged more than it took. The line is chosen that charges the requests at hand most; moments and
lengths are taken in classes, each at its best. The luck of batches comes in the order in which they are run, whatever
is in them, so every batch is taken to be as lucky as the luckiest of all.

What a device's own callers take is left out: a policy might crowd them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp, inf

import numpy as np
from numpy.typing import NDArray

from simulator.optimum.reach import LinkReach, reaches
from simulator.scenarios.scenario import EdgeGroup, PoolSpec, Scenario
from simulator.workers.slowness import SlownessPeriod
from simulator.workers.worker import edge_offers, offers_of, true_table
from simulator.world.arrivals import SimulatedRequest
from simulator.world.conditions import WorldConditions
from simulator.world.link_stream import ANSWER_BYTES, REQUEST_BYTES
from tidegate.estimate.cost_table import CostTable

Floats = NDArray[np.float64]
_ATTEMPTS = 3  # of a request, at most: so many batches can there be
_LENGTH_CLASSES = 24
_MOMENT_S = 0.02


@dataclass(frozen=True)
class Machine:
    """One worker as the program sees it. Arrays go with the requests.

    release, due: the instant from which a request can be there, and by which its answer must leave; due is before
    release where it cannot be there in time.
    charge_s: of the worker's time, at the speed of its warm-up. lasts_s: how long the computation goes on, likewise.
    pieces: how slow it is when. down: when it does not compute at all.
    """

    id: str
    release: Floats
    due: Floats
    charge_s: Floats
    lasts_s: Floats
    pieces: Sequence[SlownessPeriod]
    down: Sequence[tuple[float, float]]

    def __repr__(self) -> str:
        return f"<Machine {self.id}, {np.count_nonzero(self.due > self.release)} requests can be there>"


def machines(
    scenario: Scenario, conditions: WorldConditions, asked: Sequence[SimulatedRequest], until: float
) -> list[Machine]:
    """All workers of the scenario."""
    found = []
    for group in scenario.edges:
        for number in range(group.count):
            found.append(_edge(scenario, conditions, group, number, asked, until))
    return [*found, *(_pool(scenario, conditions, pool, asked, until) for pool in scenario.pools)]


def _edge(
    scenario: Scenario,
    conditions: WorldConditions,
    group: EdgeGroup,
    number: int,
    asked: Sequence[SimulatedRequest],
    until: float,
) -> Machine:
    id = group.id_of(number)
    tables = {offer.name: true_table(offer, group.takes_ms) for offer in edge_offers(scenario, group, number)}

    def takes_s(request: SimulatedRequest) -> float:
        table = tables.get(request.kind.model)
        longest = scenario.models[request.kind.model].edge_max_units
        if table is None or (longest is not None and request.length > longest):
            return inf
        return table.seconds_for(request.units) * exp(group.noise_sigma * request.noise)

    lasts_s = np.array([takes_s(request) for request in asked])
    return _machine(scenario, conditions, id, group.link, group, asked, lasts_s, lasts_s, until)


def _pool(
    scenario: Scenario, conditions: WorldConditions, pool: PoolSpec, asked: Sequence[SimulatedRequest], until: float
) -> Machine:
    id = f"pool/{pool.name}"
    luck = conditions.batch_luck(id)
    luckiest = min((luck() for _ in range(_ATTEMPTS * len(asked))), default=0.0)
    lucky = exp(pool.noise_sigma * min(0.0, luckiest))
    there, back = reaches(conditions, id, scenario.links[pool.link], scenario.jitter_times, until)
    lasts_s = np.full(len(asked), inf)
    charge_s = np.full(len(asked), inf)
    offers = {offer.name: offer for offer in offers_of(scenario.models, "pool", pool.slow)}
    for name, model in scenario.models.items():
        mine = np.array([place for place, request in enumerate(asked) if request.kind.model == name], int)
        if name not in offers or not mine.size:
            continue
        table, those = true_table(offers[name], pool.takes_ms), [asked[place] for place in mine]
        lasts_s[mine] = [lucky * table.seconds_for(request.units) for request in those]
        release = np.array([_arrival(there, request) for request in those])
        latest = np.array([_departure(back, request) for request in those]) - lasts_s[mine]
        charge_s[mine] = lucky * _charges(model.max_batch, table, those, release, latest)
    return _machine(scenario, conditions, id, pool.link, None, asked, charge_s, lasts_s, until)


def _charges(
    max_batch: int, table: CostTable, asked: Sequence[SimulatedRequest], release: Floats, latest: Floats
) -> Floats:
    """What each takes of its batch at least; in the table's unit.

    Args:
        release, latest: when each could start.
    """
    rows = np.array([float(request.kind.rows) for request in asked])
    lengths = np.array([float(request.length) for request in asked])
    tops = np.unique(np.quantile(lengths, np.linspace(0.0, 1.0, _LENGTH_CLASSES)))
    batch_mates = _batch_mates(rows, lengths, tops, release, latest)
    floors = np.concatenate([[0.0], tops[:-1]])  # a batch of a class is longer than this
    padded_to = np.maximum(lengths[:, None], floors[None, :])
    possible = tops[None, :] >= lengths[:, None]
    best = np.zeros(len(asked))
    for base, slope in _lines_below(table, max_batch * float(lengths.max())):
        each = base / np.minimum(max_batch, batch_mates) + slope * padded_to
        charges = rows * np.where(possible, each, np.inf).min(axis=1)
        best = max(best, charges, key=lambda one: float(one.sum()))
    return best


def _batch_mates(rows: Floats, lengths: Floats, tops: Floats, release: Floats, latest: Floats) -> Floats:
    """For each request and class of lengths: the most rows that could start in one moment with it, itself included."""
    moments = max(1, ceil(max(0.0, float(latest.max())) / _MOMENT_S) + 1)
    first = np.clip(np.floor(release / _MOMENT_S).astype(int), 0, moments - 1)
    last = np.clip(np.floor(latest / _MOMENT_S).astype(int), 0, moments - 1)
    found = np.empty((len(rows), len(tops)))
    alive = latest >= release
    for place, top in enumerate(tops):
        there = alive & (lengths <= top)
        changes = np.zeros(moments + 1)
        np.add.at(changes, first[there], rows[there])
        np.add.at(changes, last[there] + 1, -rows[there])
        rows_then = np.cumsum(changes)
        found[:, place] = [
            max(float(rows_then[begin : end + 1].max(initial=0.0)), own)
            for begin, end, own in zip(first, last, rows, strict=True)
        ]
    return found


def _lines_below(table: CostTable, most: float) -> list[tuple[float, float]]:
    """Lines (base, slope) that lie nowhere above the table from 0 to `most` units: one along each of its stretches."""
    corners = [0.0, *(at for at in table.units if 0.0 < at < most), most]
    lines = []
    for low, high in pairwise(corners):
        slope = (table.seconds_for(high) - table.seconds_for(low)) / (high - low)
        # Between its corners the table is straight, so a line is nearest to it at one of them.
        base = min(table.seconds_for(at) - slope * at for at in corners)
        if base >= 0.0:
            lines.append((base, slope))
    return lines or [(table.seconds_for(0.0), 0.0)]


def _machine(
    scenario: Scenario,
    conditions: WorldConditions,
    id: str,
    kind: str,
    group: EdgeGroup | None,
    asked: Sequence[SimulatedRequest],
    charge_s: Floats,
    lasts_s: Floats,
    until: float,
) -> Machine:
    there, back = reaches(conditions, id, scenario.links[kind], scenario.jitter_times, until)
    return Machine(
        id,
        release=np.array([_arrival(there, request) for request in asked]),
        due=np.array([_departure(back, request) for request in asked]),
        charge_s=charge_s,
        lasts_s=lasts_s,
        pieces=conditions.slowness(id, group).pieces(until),
        down=list(conditions.windows(id, "stop", "crash").after(-inf)),
    )


def _arrival(there: LinkReach, request: SimulatedRequest) -> float:
    return there.earliest(request.at, REQUEST_BYTES + int(request.units * request.kind.bytes_per_unit))


def _departure(back: LinkReach, request: SimulatedRequest) -> float:
    return back.latest(request.at + request.kind.budget_ms / 1e3, ANSWER_BYTES + request.kind.answer_bytes)

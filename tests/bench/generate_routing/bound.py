"""The most that any rule could keep, knowing the future: a linear program over the very requests that were asked.

`simulator/optimum/bound.py` proves that no policy answers more in time, for workers that compute (`Machine`). An answer
in tokens is such a computation where everything is taken at its best:

    release    sent at once, over a link without jitter, loss or limit, as it is between stretches of bad weather
    due        the last token is made when first budget + (n - 1) · next budget are over, less the way back: an answer
               whose tokens kept both budgets cannot end later
    lasts      its prompt, and its other tokens one step of one sequence each
    charge     of the engine's time: its prompt, and for each other token the least share of a step among batches
               whose steps keep the next budget on average: a mean of two batches where that is less

It may be torn and go on elsewhere for nothing. So real rules miss it by weather, by batches that are not full, by
steps that wait for others' prompts, and by the future. Weather, however, is known: a stretch with a longer delay is a
later release and an earlier due for what falls into it, unless waiting for its end is better (`LinkReach`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Final

import numpy as np

from simulator.optimum.bound import NoSolver, Program
from simulator.optimum.machines import Machine
from simulator.optimum.reach import LinkReach, Window
from simulator.scenarios.scenario import Decoding, Scenario
from simulator.workers.slowness import SlownessPeriod
from tests.bench.generate_routing.fleet import LinkKind, decodings
from tests.bench.generate_routing.schedule import Asked
from tidegate.estimate.cost_table import CostTable

__all__ = ["NoSolver", "most_kept"]
_SLOT_S: Final = 0.2


def most_kept(
    scenario: Scenario, asked: Sequence[Asked], link: LinkKind, seed: int, *, from_s: float, to_s: float
) -> float:
    """No rule keeps more of the requests of that time, on average. Raises NoSolver."""
    worth = np.array([1.0 if from_s <= one.at < to_s else 0.0 for one in asked])
    if not worth.sum():
        return 1.0
    until = max(one.at + _lasts_at_most_s(one) for one in asked) + _SLOT_S
    reaches = {tier: _reach(link, tier, to_s, seed) for tier in ("edge", "pool")}
    (group,), (edge, pool) = scenario.edges, decodings(scenario)
    fleet = [
        _machine(f"edge/{number}", asked, edge, group.slow_of(number), reaches["edge"], until)
        for number in range(group.count)
    ]
    fleet.append(_machine("pool", asked, pool, 1.0, reaches["pool"], until))
    proven, _ = Program(fleet, worth, until, _SLOT_S).best()
    return min(1.0, proven / float(worth.sum()))


def _lasts_at_most_s(one: Asked) -> float:
    return one.ttft_s + (one.tokens - 1) * one.tpot_s


def _reach(link: LinkKind, tier: str, seconds: float, seed: int) -> LinkReach:
    """One direction; both are alike."""
    usual_s = _delay_s(link.usual[tier])
    if tier not in link.bad:
        return LinkReach(least_s=usual_s)
    changes = [one for one in link.changes(seconds, seed) if one.tier == tier]
    windows: list[Window] = [(begin.at, end.at) for begin, end in zip(changes[::2], changes[1::2], strict=True)]
    return LinkReach(least_s=usual_s, bad_times=_delay_s(link.bad[tier][2]) / usual_s, bad=windows)


def _delay_s(profile: Mapping[str, float]) -> float:
    return profile["delay_ms"] / 1e3


def _machine(
    id: str, asked: Sequence[Asked], decoding: Decoding, slow: float, reach: LinkReach, until: float
) -> Machine:
    steps = CostTable([(float(batch), slow * ms / 1e3) for batch, ms in decoding.step_ms])
    release, due, lasts, charge = [], [], [], []
    for one in asked:
        prompt_s = slow * decoding.prefill_ms / 1e3 * len(one.prompt)
        there = reach.earliest(one.at, 0)
        # A first token that comes too late even alone, or steps that no batch makes short enough: never there.
        is_possible = there + prompt_s <= reach.latest(one.at + one.ttft_s, 0)
        share_s = _least_share_s(steps, decoding.slots, one.tpot_s)
        lasts_s = prompt_s + (one.tokens - 1) * steps.seconds_for(1.0)
        release.append(there)
        due.append(reach.latest(one.at + _lasts_at_most_s(one), 0) if is_possible and share_s else there)
        lasts.append(lasts_s)
        charge.append(min(lasts_s, prompt_s + (one.tokens - 1) * (share_s or 0.0)))
    return Machine(
        id, np.array(release), np.array(due), np.array(charge), np.array(lasts), [SlownessPeriod(0.0, until, 1.0)], []
    )


def _least_share_s(steps: CostTable, slots: int, most_s: float) -> float | None:
    """The least of an engine's time for one token, of batches whose steps take `most_s` on average; None: of none."""
    points = [
        (steps.seconds_for(float(batch)), steps.seconds_for(float(batch)) / batch) for batch in range(1, slots + 1)
    ]
    found = []
    for (low_s, low_share), (high_s, high_share) in combinations_with_replacement(sorted(points), 2):
        if low_s > most_s:
            continue
        of_high = 1.0 if high_s <= most_s else (most_s - low_s) / (high_s - low_s)
        found.append(min(low_share, low_share + of_high * (high_share - low_share)))
    return min(found, default=None)

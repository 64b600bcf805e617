"""The bound is above what any policy attains, and the clairvoyant foresees what comes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.event_queue import EventQueue
from simulator.optimum.bound import Program, upper_bound
from simulator.optimum.machines import Machine, _charges
from simulator.optimum.reach import reaches
from simulator.scenarios.scenario import ClassSpec, Size
from simulator.simulation import simulate
from simulator.workers.edge import EdgeWorker
from simulator.workers.job import SimulatedJob
from simulator.workers.slowness import Slowness, SlownessPeriod
from simulator.workers.worker import offers_of
from simulator.world.arrivals import SimulatedRequest
from simulator.world.conditions import WorldConditions
from tests.simulator.test_simulation import everything_wrong
from tests.simulator.worlds import edited
from tidegate.estimate.cost_table import CostTable
from tidegate.netsim.links.regime import Windows


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tidegate", "value", "clairvoyant", "static+ledger", "headroom"])
@pytest.mark.parametrize("rate", ["60", "250"])
def test_no_policy_attains_more_than_the_bound(policy: str, rate: str) -> None:
    for loaded in (everything_wrong(), edited(("rate: 60", f"rate: {rate}"), ("duration_s: 6", "duration_s: 3"))):
        assert simulate(loaded, policy, 3).tally.all.attainment <= upper_bound(loaded, 3).attainment + 1e-9


@pytest.mark.slow
def test_a_fleet_that_cannot_do_a_third_of_the_work_is_bounded_by_a_third() -> None:
    # given one device that takes 40 ms for each of 75 requests a second, and no pool
    loaded = edited(
        ("count: 2, slow: [1.0, 2.0]", "count: 1"),
        ("pools:\n  - {name: gpu, link: wan}\n", ""),
        ("edge_ms: [[1, 4], [100, 40]]", "edge_ms: [[1, 40]]"),
        ("rate: 60", "rate: 75"),
        ("share: 1,", "share: 0,"),
    )
    bound = upper_bound(loaded, 1)
    assert 0.25 < bound.attainment < 0.40
    assert simulate(loaded, "cheapest", 1).tally.all.attainment <= bound.attainment
    assert bound.by_class["short"] == pytest.approx(bound.attainment, abs=0.01)
    # a narrower slot can only sharpen it, but for the shares of requests that it cuts
    assert upper_bound(loaded, 1, slot_s=0.02).attainment <= bound.attainment + 1e-6


@pytest.mark.slow
def test_requests_that_no_worker_can_compute_in_time_bound_their_class() -> None:
    # given a pool that no way there and back fits into the budget of
    loaded = edited(("delay_ms: 10", "delay_ms: 101"), ("budget_ms: 500", "budget_ms: 200"))
    bound = upper_bound(loaded, 1)
    assert bound.by_class["long"] == 0.0  # edges take rows of at most 100
    assert bound.attainment == pytest.approx(bound.by_class["short"] * 0.75, abs=0.1)
    assert upper_bound(loaded, 1, weights={"short": 0.0, "long": 1.0}).attainment == 0.0


def test_a_world_without_requests_that_count_is_answered_whole() -> None:
    assert upper_bound(edited(("rate: 60", "rate: 0.0001")), 1).attainment == 1.0


@pytest.mark.slow
@given(st.lists(st.floats(0.0, 5.0), min_size=9, max_size=9))
def test_any_prices_prove_a_bound(prices: list[float]) -> None:
    # given one worker, four slots of 0.1 s and five requests of 0.1 s each: four can be done
    program = Program([_machine(count=5, takes_s=0.1)], np.ones(5), 0.4, 0.1)
    assert program.best()[0] == pytest.approx(4.0)
    assert program.proven(np.array(prices)) >= 4.0 - 1e-9


def test_heat_counts_only_for_requests_that_cannot_have_begun_before_it() -> None:
    def done(released_at: float) -> float:
        # given a device that is twice as slow from 0.2 s on, and 0.1 s of work that is due at 0.3 s
        machine = _machine(count=1, takes_s=0.1, release=released_at, due=0.3)
        hot = [SlownessPeriod(0.0, 0.2, 1.0), SlownessPeriod(0.2, float("inf"), 2.0)]
        return Program([_with(machine, pieces=hot)], np.ones(1), 0.4, 0.1).best()[0]

    assert done(0.15) == pytest.approx(1.0)  # begun at 0.15 it goes on at full speed
    assert done(0.21) == 0.0


def test_a_worker_that_is_down_has_no_time() -> None:
    down = _with(_machine(count=4, takes_s=0.1), down=[(0.1, 0.3)])
    assert Program([down], np.ones(4), 0.4, 0.1).best()[0] == pytest.approx(2.0)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.floats(5.0, 200.0))
def test_no_batch_is_charged_more_than_it_takes(seed: int, members: int, longest: float) -> None:
    # given requests of which any may start between its own instants
    draw = Random(seed)
    table = CostTable([(1, 8), (64, 9), (512, 18 + draw.random()), (4096, 90)])
    kind = ClassSpec(name="x", share=1, model="m", length=Size(median=8), budget_ms=100)
    asked = [SimulatedRequest(n, 0.0, kind, 1 + int(longest * draw.random()), 0.0, hard=False) for n in range(30)]
    release = np.array([draw.random() for _ in asked])
    latest = release + [0.3 * draw.random() for _ in asked]
    charges = _charges(8, table, asked, release, latest)

    # when some that can start at one moment run together
    moment = draw.random()
    can = [n for n in range(30) if release[n] <= moment <= latest[n]][: min(members, 8)]
    if can:
        padded = max(asked[n].length for n in can) * len(can)
        # then
        assert sum(charges[n] for n in can) <= table.seconds_for(padded) + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_nothing_real_is_earlier_than_the_earliest_or_in_time_after_the_latest(seed: int) -> None:
    loaded = everything_wrong()
    draw = Random(seed)
    for id in ("edge/device-1", "pool/gpu"):
        conditions = WorldConditions(loaded, seed)
        kind = loaded.scenario.link_of[id]
        link = conditions.link(id, kind)
        ways = reaches(conditions, id, loaded.scenario.links[kind], 1.0, 20.0)
        for way, direction in zip(ways, (link.to_target, link.from_target), strict=True):
            at = 0.0
            for _ in range(400):
                at += 0.05 * draw.random()
                size = int(2000 * draw.random())
                delivered_at = direction.delivered_at(size, at)
                assert way.earliest(at, size) <= delivered_at + 1e-9
                if delivered_at < 15.0:
                    assert at <= way.latest(delivered_at, size) + 1e-9
                assert way.arrival(at, size) >= way.earliest(at, size)


def test_an_edge_foresees_what_it_then_does() -> None:
    # given a device with heat in the middle and three requests of unlike luck, the last of which is still to come
    loaded = edited()
    events = EventQueue()
    slowness = Slowness(faults=((Windows([(1.03, 5.0)]), 2.0),))
    offers = offers_of(loaded.scenario.models, "edge", 1.0)
    worker = EdgeWorker(
        events, "edge/a", offers, max_queue=9, sigma=0.2, slowness=slowness, standstills=Windows([(1.05, 1.06)])
    )
    asked = _Answers(events)
    jobs = [
        SimulatedJob(n, asked, "m", rows=1, length=50 + n, deadline=3.0 - 0.1 * n, priority=0, luck=n - 1.0)
        for n in range(3)
    ]
    events.run(until=1.0)
    worker.take(jobs[0], 1.0)
    worker.take(jobs[1], 1.0)

    foreseen = worker.foreseen([(1.01, jobs[2])], 1.0)
    events.schedule(1.01, worker.take, jobs[2], 1.01)
    events.run()

    # Of the one that runs nothing is said: it is nobody's to place any more.
    assert foreseen == {job: (pytest.approx(asked.at[job.id]), None) for job in jobs[1:]}


@pytest.mark.slow
def test_the_clairvoyant_misses_less_than_a_policy_that_estimates() -> None:
    loaded = edited(("rate: 60", "rate: 60"), ("{name: gpu, link: wan}", "{name: gpu, link: wan, slow: 8.0}"))
    seeing, guessing = (simulate(loaded, policy, 2).tally.all.attainment for policy in ("clairvoyant", "round-robin"))
    assert seeing > guessing


class _Answers:
    def __init__(self, events: EventQueue) -> None:
        self.at: dict[int, float] = {}
        self._events = events

    def accepted(self, job: SimulatedJob, word: object) -> None: ...

    def answered(self, job: SimulatedJob, queue_s: float, compute_s: float, load: object) -> None:
        self.at[job.id] = self._events.now

    def refused(self, job: SimulatedJob, error: object, load: object) -> None:
        raise AssertionError(error)


def _machine(*, count: int, takes_s: float, release: float = 0.0, due: float = 0.4) -> Machine:
    takes = np.full(count, takes_s)
    always = [SlownessPeriod(0.0, float("inf"), 1.0)]
    return Machine(
        "edge/a",
        release=np.full(count, release),
        due=np.full(count, due),
        charge_s=takes,
        lasts_s=takes,
        pieces=always,
        down=[],
    )


def _with(machine: Machine, **changes: object) -> Machine:
    return replace(machine, **changes)  # type: ignore[arg-type]


def test_a_link_that_dies_after_bad_weather_is_laid_out_too() -> None:
    from simulator.optimum.reach import laid_out
    from tidegate.netsim.links.profile import LinkProfile, SharedConditions, States

    profile = LinkProfile(states=States(good_s=1.0, bad_s=0.5, dead_s=0.3, delay_times=4.0))
    air = SharedConditions.over(profile, lambda name: Random(name).random, None)
    again = SharedConditions.over(profile, lambda name: Random(name).random, None)
    gone = laid_out(air.gone, 30.0)
    assert len(gone) > 2
    assert again.gone is not None
    for start, end in gone:
        assert again.gone.until(start) == end
        assert again.gone.until(end) == end

"""Arrivals: the rate and the pattern are those of the scenario."""

from __future__ import annotations

from itertools import islice, pairwise
from statistics import fmean, pvariance

import msgspec
import pytest

from simulator.scenarios.scenario import ArrivalsSpec
from simulator.world.arrivals import instants, requests
from tests.simulator.worlds import edited

PROCESSES = ["poisson", "bursty", "periodic", "pareto"]


def spec(process: str, **more: object) -> ArrivalsSpec:
    return msgspec.convert({"rate": 200.0, "process": process, **more}, ArrivalsSpec)


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_has_the_rate_it_was_given_and_comes_in_order(process: str) -> None:
    found = list(instants(spec(process, alpha=2.5), 500.0, seed=4))
    assert len(found) / 500.0 == pytest.approx(200.0, rel=0.08)
    assert found == sorted(found)
    assert found[0] >= 0.0 and found[-1] < 500.0


def variability(process: str) -> float:
    """Variance of the counts of tenths of a second over their mean: 1 for Poisson."""
    counts = [0] * 1000
    for at in instants(spec(process, alpha=2.5), 100.0, seed=5):
        counts[int(at * 10)] += 1
    return pvariance(counts) / fmean(counts)


def test_bursts_are_burstier_than_poisson_and_periodic_arrivals_are_not() -> None:
    assert variability("poisson") == pytest.approx(1.0, abs=0.15)
    assert variability("bursty") > 2.0
    assert variability("periodic") < variability("bursty")


def test_a_step_multiplies_the_rate_while_it_lasts() -> None:
    stepped = spec("poisson", steps=[{"at_s": 10.0, "for_s": 10.0, "times": 5.0}])
    found = list(instants(stepped, 30.0, seed=1))
    counts = [sum(low <= at < low + 10.0 for at in found) for low in (0.0, 10.0, 20.0)]
    assert counts[1] == pytest.approx(5 * 2000, rel=0.05)
    assert counts[0] == pytest.approx(2000, rel=0.1) and counts[2] == pytest.approx(2000, rel=0.1)


def test_the_same_requests_come_at_every_load_only_closer_together() -> None:
    scenario = edited().scenario
    slow = list(islice(requests(scenario, 3), 50))
    fast = list(islice(requests(scenario.with_rate(600.0), 3), 50))
    assert [(one.kind.name, one.length, one.noise, one.hard) for one in slow] == [
        (one.kind.name, one.length, one.noise, one.hard) for one in fast
    ]
    assert [one.at / 10 for one in slow] == pytest.approx([one.at for one in fast])


def test_another_seed_is_another_world() -> None:
    scenario = edited().scenario
    assert list(islice(requests(scenario, 1), 5)) == list(islice(requests(scenario, 1), 5))
    assert list(islice(requests(scenario, 1), 5)) != list(islice(requests(scenario, 2), 5))


def test_requests_have_lengths_within_their_class() -> None:
    kinds = edited().scenario.classes
    for request in islice(requests(edited().scenario, 1), 500):
        assert request.kind in kinds
        assert request.kind.length.min <= request.length <= request.kind.length.max
        assert request.units == request.length


def test_gaps_of_a_long_tail_are_sometimes_very_long() -> None:
    found = list(instants(spec("pareto", alpha=1.5), 50.0, seed=2))
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert max(gaps) > 20 * fmean(gaps)

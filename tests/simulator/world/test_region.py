"""Sites in the simulator: real cores behind real cores, every request once, and a cut site that serves on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from simulator.region import RegionWorld
from simulator.scenarios.scenario import Fault, Scenario
from simulator.scenarios.scenario_file import LoadedScenario, load

pytestmark = pytest.mark.slow


def small(*, rate: float = 60.0, seconds: float = 6.0, faults: tuple[Fault, ...] = ()) -> LoadedScenario:
    """Three sites of twenty devices."""
    loaded = load("three_sites")
    scenario: Scenario = loaded.scenario.with_rate(rate).lasting(seconds)
    edges = tuple(replace(group, count=20, link="lan") for group in scenario.edges)
    return loaded.replaced(replace(scenario, edges=edges, faults=faults))


def test_every_request_of_a_region_ends_once_and_all_sites_have_a_part() -> None:
    world = RegionWorld(small(), "tidegate", 1)
    run = world.run()

    assert run.tally.all.attainment > 0.95
    assert set(run.tally.served_by) == {"site/north", "site/south", "site/east"}
    # The region's gateway has sent them on: a site's own tally counts its own callers, of which there are none.
    assert all(site.gateway.tally.all.arrivals == 0 for site in world.sites)
    assert not any(site.in_flight for site in world.sites)
    assert all(site.summaries <= 1.1 * world.events.now for site in world.sites)


def test_the_same_seed_gives_the_same_region() -> None:
    first, second = (RegionWorld(small(seconds=4.0), "tidegate", 3).run() for _ in range(2))
    assert (first.tally.all.in_time, first.events) == (second.tally.all.in_time, second.events)


def test_a_site_whose_link_is_cut_serves_its_own_callers() -> None:
    cut = Fault(kind="partition", target="site/north", at_s=2.0, for_s=30.0)
    world = RegionWorld(small(rate=40.0, faults=(cut,)), "tidegate", 1, local_share=0.5)
    run = world.run()

    own = world.sites[0].gateway.tally
    own.check()
    assert own.all.arrivals > 20
    assert own.all.attainment > 0.95
    assert run.tally.all.attainment > 0.8
    assert run.tally.served_by["site/south"] > run.tally.served_by["site/north"]

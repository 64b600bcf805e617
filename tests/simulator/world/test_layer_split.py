"""Cut models on virtual time: the real choice, both halves, and one end for each request."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from simulator.scenarios.scenario_file import load
from simulator.simulation import World


def run(mbit_s: float, policy: str = "tidegate", *, cuts: bool = True) -> World:
    loaded = load("camera_site")
    scenario = loaded.scenario.with_rate(6.0).lasting(16.0)
    uplink = replace(scenario.links["uplink"], to_mbit=mbit_s)
    models = scenario.models if cuts else {name: replace(one, cuts=()) for name, one in scenario.models.items()}
    world = World(
        loaded.replaced(replace(scenario, links={**scenario.links, "uplink": uplink}, models=models)), policy, 1
    )
    world.run().tally.check()
    return world


@pytest.mark.slow
def test_on_a_thin_link_cuts_answer_what_neither_devices_nor_the_pool_can() -> None:
    cut, whole = run(5.0).tally, run(5.0, cuts=False).tally
    assert cut.all.attainment > whole.all.attainment + 0.2
    assert cut.cut > 0.5 * cut.all.arrivals
    assert cut.useful_s["edge"] > 0.0
    assert whole.cut == 0


@pytest.mark.slow
def test_on_a_wide_link_nothing_is_lost_by_cuts_and_baselines_make_none() -> None:
    assert run(200.0).tally.all.attainment >= run(200.0, cuts=False).tally.all.attainment
    assert run(5.0, "all-cloud").tally.cut == 0

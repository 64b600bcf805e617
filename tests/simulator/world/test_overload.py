"""Admission in a simulated fleet: a step, a storm of retries, a tenant that storms."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.core.admission.admission import Admission
from simulator.scenarios.scenario_file import LoadedScenario, ScenarioError, load
from simulator.simulation import Run, World, simulate
from simulator.world.admission import FixedLimitAdmission
from simulator.world.tally import TIMELINE_BIN_S
from tests.simulator.worlds import edited

pytestmark = pytest.mark.slow


def attained(run: Run, from_s: float, until_s: float) -> float:
    """Of what arrived between two instants of the scenario (a second later on the world's clock)."""
    bins = [n for place, n in run.tally.timeline.items() if from_s + 1 <= place * TIMELINE_BIN_S < until_s + 1]
    return sum(in_time for _, in_time in bins) / sum(arrivals for arrivals, _ in bins)


def without_tenants(loaded: LoadedScenario) -> LoadedScenario:
    return loaded.replaced(replace(loaded.scenario, tenants={}))


def test_a_fivefold_step_costs_the_least_important_and_is_over_when_it_is_over() -> None:
    world = World(load("overload_step"), "value", 1)
    run = world.run()
    assert run.tally.by_class["interactive"].attainment > 0.9 > run.tally.by_class["bulk"].attainment
    assert attained(run, 15, 25) > 0.7
    assert attained(run, 25, 30) > attained(run, 5, 15) - 0.05
    door = world.gateways[0].router.door
    assert door.in_flight == 0


def test_clients_that_retry_at_once_do_not_multiply_the_work() -> None:
    ours, plain = (simulate(load("retry_storm"), policy, 1) for policy in ("value", "round-robin"))
    assert ours.tally.retries > 0
    assert ours.tally.amplification <= 1.2 < plain.tally.amplification
    assert attained(ours, 25, 30) > 0.95


def test_a_tenant_that_storms_spends_its_own_budget_and_no_others() -> None:
    storm = load("tenant_storm")
    bounded, free = simulate(storm, "value", 1), simulate(without_tenants(storm), "value", 1)
    assert bounded.tally.by_tenant["clinic"].attainment > 0.98
    assert bounded.tally.by_tenant["crawler"].outcomes["overloaded"] > 1000
    assert bounded.tally.by_tenant["clinic"].attainment > free.tally.by_tenant["clinic"].attainment


def test_retries_are_tries_of_one_request_and_baselines_have_a_plain_door() -> None:
    swamped = edited(
        ("rate: 60", "rate: 2000"), ("duration_s: 6", "duration_s: 2"), ("priority: 1}", "priority: 1, retries: 2}")
    )
    for policy, door in (("value", Admission), ("all-cloud", FixedLimitAdmission)):
        world = World(swamped, policy, 1)
        run = world.run()  # checks that arrivals are the sum of the outcomes
        assert run.tally.retries > 10
        assert isinstance(world.gateways[0].router.door, door)


def test_shares_and_retries_that_cannot_be_are_errors_that_name_the_key() -> None:
    with pytest.raises(ScenarioError, match=r"steps\[0\].shares': there is no 'nobody'"):
        edited(("{rate: 60}", "{rate: 60, steps: [{at_s: 1, for_s: 1, times: 2, shares: {nobody: 1}}]}"))
    with pytest.raises(ScenarioError, match="retries must be 0 or more"):
        edited(("priority: 1}", "priority: 1, retries: -1}"))

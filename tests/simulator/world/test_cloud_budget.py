"""The cloud's budget in a simulated fleet is kept, at the cost of the requests that matter least."""

from __future__ import annotations

import pytest

from simulator.scenarios.scenario_file import ScenarioError
from simulator.simulation import Run, simulate
from tests.simulator.worlds import edited

# Half of the requests need the pool, since no edge takes rows that long; a third of those are of high priority.
BUSY = (
    ("duration_s: 6\nwarmup_s: 1", "duration_s: 60\nwarmup_s: 30"),
    ("rate: 60", "rate: 40"),
    ("budget_ms: 200, priority: 1}", "budget_ms: 200, priority: 3}"),
    (
        "- {name: long, share: 1, model: m, length: {median: 300, sigma: 0.3, max: 1000}, budget_ms: 500}",
        "- {name: long, share: 2, model: m, length: {median: 300, sigma: 0.3, min: 101, max: 1000}, budget_ms: 500}\n"
        "  - {name: vital, share: 1, model: m, length: {median: 300, sigma: 0.3, min: 101, max: 1000},"
        " budget_ms: 500, priority: 1}",
    ),
)
BUDGET = 0.1


@pytest.fixture(scope="module")
def free() -> Run:
    return simulate(edited(*BUSY), "value", 1)


@pytest.fixture(scope="module")
def bound() -> Run:
    return simulate(edited(*BUSY, extra=f"\ncloud_budget: {BUDGET}\n"), "value", 1)


def spend(run: Run) -> float:
    return run.compute_s["pool"] / run.counted_s


def attainment(run: Run, name: str) -> float:
    return run.tally.by_class[name].attainment


@pytest.mark.slow
def test_under_steady_load_spend_converges_to_the_budget(free: Run, bound: Run) -> None:
    assert spend(free) > 1.5 * BUDGET, "the budget must bind for the rest to mean anything"
    assert spend(bound) == pytest.approx(BUDGET, rel=0.15)


@pytest.mark.slow
def test_requests_of_high_priority_keep_their_goodput_while_others_give_way(free: Run, bound: Run) -> None:
    assert attainment(free, "long") > 0.98 and attainment(free, "vital") > 0.98
    assert attainment(bound, "vital") > attainment(bound, "long") + 0.3
    assert attainment(bound, "vital") > 0.9
    assert attainment(bound, "short") > 0.97, "who has an edge needs no budget"


@pytest.mark.slow
def test_a_budget_that_does_not_bind_changes_nothing(free: Run) -> None:
    rich = simulate(edited(*BUSY, extra="\ncloud_budget: 50\n"), "value", 1)
    assert (rich.tally.all.in_time, rich.compute_s) == (free.tally.all.in_time, free.compute_s)


def test_a_budget_of_nothing_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ScenarioError, match="'cloud_budget': must be above 0, not 0"):
        edited(extra="\ncloud_budget: 0\n")

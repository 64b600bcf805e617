"""The cloud's price while its budget is overspent: it doubles in time, comes back, and never leaves its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.gateway import GatewayConfig
from gateway.core.fleet.link_events import LinkUp
from gateway.core.placement.cloud_budget import CAP, CloudBudget
from gateway.core.placement.placer import RETRY_SPENT_S, Decision
from gateway.core.placement.utility import UtilityPlacer, UtilityWeights
from gateway.placement_stack import policy_of
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, spec, variant
from tidegate.config import ConfigError, load
from tidegate.outcome import Overloaded

TICK_S = 0.2


def run(budget: CloudBudget, rate: float, for_s: float, since: float = 0.0) -> float:
    """The factor after spending at this rate; looked at in every tick."""
    ticks = round(for_s / TICK_S)
    factor = budget.factor(since)
    for tick in range(1, ticks + 1):
        budget.spent(rate * TICK_S)
        factor = budget.factor(since + tick * TICK_S + 1e-6)
    return factor


def test_a_new_budget_leaves_the_cloud_at_its_plain_price() -> None:
    assert CloudBudget(0.5).factor(NOW) == 1.0


@pytest.mark.parametrize("before_s", [5.0, 20.0, 40.0])
def test_twice_the_budget_doubles_the_price_in_five_seconds_wherever_it_stands(before_s: float) -> None:
    budget = CloudBudget(0.5)
    at = run(budget, 1.0, before_s)
    assert run(budget, 1.0, 5.0, since=before_s) == pytest.approx(2.0 * at, rel=0.02)


def test_within_the_budget_the_price_is_the_plain_one() -> None:
    assert run(CloudBudget(0.5), 0.5, 60.0) == 1.0


def test_silence_brings_the_price_back_whether_anybody_looks_or_not() -> None:
    for looks in (True, False):
        budget = CloudBudget(0.5)
        high = run(budget, 1.0, 20.0)
        if looks:
            assert run(budget, 0.0, 6.0, since=20.0) < 0.6 * high
            assert run(budget, 0.0, 60.0, since=26.0) == 1.0
        else:
            assert budget.factor(26.0) < 0.6 * high
            assert budget.factor(1e9) == 1.0
    assert "1 times" in repr(budget)


def test_one_large_batch_is_no_alarm() -> None:
    budget = CloudBudget(0.5)
    run(budget, 0.2, 10.0)
    budget.spent(1.0)
    assert run(budget, 0.2, 10.0, since=10.0) == 1.0
    budget.spent(1.0)
    assert budget.factor(20.2001) < 1.1


@pytest.mark.slow
@given(
    st.floats(1e-3, 100.0),
    st.lists(st.tuples(st.floats(0.0, 1e3), st.floats(0.0, 1e4)), max_size=40),
)
def test_whatever_is_spent_the_price_is_neither_below_its_plain_one_nor_endless(
    allowed: float, happens: list[tuple[float, float]]
) -> None:
    budget, now = CloudBudget(allowed), NOW
    for later_s, spent_s in happens:
        now += later_s
        budget.spent(spent_s)
        assert 1.0 <= budget.factor(now) <= 1.0 + CAP


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=30), st.floats(1.0, 5.0))
def test_who_spends_more_pays_no_less(rates: list[float], times: float) -> None:
    less, more = CloudBudget(1.0), CloudBudget(1.0)
    for number, rate in enumerate(rates):
        low = run(less, rate, TICK_S, since=number * TICK_S)
        assert low <= run(more, rate * times, TICK_S, since=number * TICK_S) * (1 + 1e-9)


# -- in placement ----------------------------------------------------------------------------------------------------


PLAIN = UtilityWeights(cost=1.0, earliness=0.01)  # a second of the pool is worth one answer


def dear(times: float) -> CloudBudget:
    """A budget that was overspent until NOW, for as long as it took the cloud to cost so many times its plain price."""
    rehearsed, ticks = CloudBudget(0.1), 0
    while run(rehearsed, 0.2, TICK_S, since=ticks * TICK_S) < times:
        ticks += 1
    budget = CloudBudget(0.1)
    run(budget, 0.2, (ticks + 1) * TICK_S, since=NOW - (ticks + 1) * TICK_S)
    assert budget.factor(NOW) == pytest.approx(times, rel=0.03)
    return budget


def goes_to(decision: Decision) -> str:
    assert decision.chosen is not None
    return decision.chosen.target.id


def together(rates: list[float], for_s: float, *, late: dict[int, float] | None = None) -> list[float]:
    """The prices of gateways that share a budget of 0.5 and tell each other; `late`: when one of them starts."""
    budgets = [CloudBudget(0.5) for _ in rates]
    for tick in range(1, round(for_s / TICK_S) + 1):
        now = tick * TICK_S + 1e-6
        running = [place for place in range(len(rates)) if now >= (late or {}).get(place, 0.0)]
        told = {place: budgets[place].told(now) for place in running}
        for place in running:
            budgets[place].spent(rates[place] * TICK_S)
            budgets[place].beside([one for other, one in told.items() if other != place], 0)
    return [one.factor(for_s + TICK_S) for one in budgets]


def test_gateways_side_by_side_have_one_budget_and_one_price() -> None:
    within = together([0.2, 0.2], 30.0)
    assert within == [1.0, 1.0]
    over = together([0.4, 0.4, 0.2], 10.0)
    assert over[0] > 2.5, "together they spend twice the budget, though none of them does"
    assert over == pytest.approx([over[0]] * 3, rel=0.05)


def test_a_gateway_that_comes_later_takes_over_the_others_price() -> None:
    prices = together([0.5, 0.5, 0.1], 20.0, late={2: 15.0})
    assert prices[2] == pytest.approx(prices[0], rel=0.1)


def test_one_that_says_nothing_is_taken_to_spend_its_part() -> None:
    alone, silent = CloudBudget(0.5), CloudBudget(0.5)
    silent.beside([], 1)
    assert run(alone, 0.4, 10.0) == 1.0
    assert run(silent, 0.4, 10.0) > 1.3


def test_while_the_cloud_is_dear_a_doubtful_edge_is_the_better_bet() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.100, quality=0.98), pool_main=variant(compute_s=0.010))
    cheap = UtilityPlacer(fleet, PLAIN, cloud_budget=CloudBudget(0.1))
    assert goes_to(cheap.decide(ask(budget_s=0.110), NOW)) == "pool/main"
    placer = UtilityPlacer(fleet, PLAIN, cloud_budget=dear(60.0))
    assert goes_to(placer.decide(ask(budget_s=0.110), NOW)) == "edge/a"
    assert goes_to(placer.decide(ask(budget_s=0.110)._replace(priority=1), NOW)) == "pool/main"


def test_what_only_the_cloud_can_answer_is_refused_when_it_is_not_worth_it_and_high_priority_last() -> None:
    budget = dear(150.0)  # an answer costs 1.5
    placer = UtilityPlacer(fleet_of(pool_main=variant(compute_s=0.010)), PLAIN, cloud_budget=budget)

    refusal = placer.decide(ask(), NOW).refusal
    assert isinstance(refusal, Overloaded)
    assert refusal.retry_after_s == RETRY_SPENT_S
    assert "the cloud's budget is spent" in refusal.message
    assert goes_to(placer.decide(ask()._replace(priority=1), NOW)) == "pool/main"


def test_an_edge_is_never_refused_for_the_clouds_budget() -> None:
    placer = UtilityPlacer(fleet_of(edge_a=variant(compute_s=0.010)), cloud_budget=dear(10_000.0))
    assert goes_to(placer.decide(ask(), NOW)) == "edge/a"


def test_a_server_on_the_premises_is_not_paid_from_the_clouds_budget() -> None:
    fleet = fleet_of(pool_main=variant(compute_s=0.010))
    site = spec("pool/site", zone="site")
    fleet.add(site, NOW)
    fleet.fold(LinkUp(site.id, site.id, 1, (offer(variant(compute_s=0.020)),)), NOW)
    placer = UtilityPlacer(fleet, PLAIN, cloud_budget=dear(100.0))
    assert goes_to(placer.decide(ask(), NOW)) == "pool/site"


def test_a_budget_without_a_policy_that_weighs_prices_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="cloud_budget needs policy: value; 'cheapest' does not weigh"):
        load(GatewayConfig, policy="cheapest", cloud_budget=0.5)
    assert load(GatewayConfig, policy="value", cloud_budget=0.5).cloud_budget == 0.5


def test_a_weight_of_the_bill_without_a_policy_that_weighs_it_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"cost_weight needs policy: value; .* or set policy: value"):
        load(GatewayConfig, policy="cheapest", cost_weight=5.0)
    assert load(GatewayConfig, policy="cheapest").policy == "cheapest"
    with pytest.raises(ConfigError, match="cost_weight"):
        load(GatewayConfig, cost_weight=-1.0)


def test_the_configured_weight_is_the_placers() -> None:
    config = load(GatewayConfig, cost_weight=5.0)
    placer, _ = policy_of(config, fleet_of(edge_a=variant()), lambda: 0.5, lambda: False)
    assert isinstance(placer, UtilityPlacer)
    assert placer.prices == UtilityWeights.weighing(5.0)

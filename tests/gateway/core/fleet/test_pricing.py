"""Prices: each grows with what it stands for, and a fleet's work follows them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.pricing import METERED_BYTE, TIER, Tier, byte_price_of, price_of
from gateway.core.placement.placer import Placer, estimate
from gateway.core.placement.utility import UtilityPlacer
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tidegate.fleet.conditions import UNTOLD, DeviceConditions

SHARES = st.floats(0.0, 1.0)
DEGREES = st.floats(-100.0, 200.0)
CONDITIONS = st.builds(
    DeviceConditions,
    battery=st.none() | SHARES,
    charging=st.booleans(),
    temperature_c=st.none() | DEGREES,
    throttled=st.booleans(),
    metered=st.booleans(),
)
TIERS = st.sampled_from(sorted(TIER))


@pytest.mark.parametrize(("conditions", "times"), [
    (UNTOLD, 1.0),
    (DeviceConditions(battery=0.8), 1.0),
    (DeviceConditions(battery=0.4), 7.0),
    (DeviceConditions(battery=0.2), 14.5),
    (DeviceConditions(battery=0.0), 25.0),
    (DeviceConditions(battery=0.1, charging=True), 1.0),
    (DeviceConditions(temperature_c=65.0), 1.0),
    (DeviceConditions(temperature_c=75.0), 2.0),
    (DeviceConditions(temperature_c=120.0), 5.0),
    (DeviceConditions(temperature_c=30.0, throttled=True), 5.0),
    (DeviceConditions(battery=0.4, throttled=True), 35.0),
    (DeviceConditions(metered=True), 1.0),
])  # fmt: skip
def test_a_devices_second_costs_what_the_table_says(conditions: DeviceConditions, times: float) -> None:
    assert price_of("edge", conditions) == pytest.approx(times * TIER["edge"])


@given(TIERS, CONDITIONS, st.floats(1.0, 1e6))
def test_prices_are_positive_bounded_and_never_below_the_tiers_own(
    tier: Tier, conditions: DeviceConditions, scarcity: float
) -> None:
    price = price_of(tier, conditions, scarcity)
    assert TIER[tier] <= price / scarcity * (1 + 1e-9)
    assert price <= 125.0 * TIER[tier] * scarcity * (1 + 1e-9)
    assert 0.0 <= byte_price_of(conditions) <= METERED_BYTE


@given(CONDITIONS, SHARES, SHARES)
def test_less_charge_is_never_cheaper(conditions: DeviceConditions, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert price_of("edge", replace(conditions, battery=low)) >= price_of("edge", replace(conditions, battery=high))


@given(CONDITIONS, DEGREES, DEGREES)
def test_more_heat_is_never_cheaper(conditions: DeviceConditions, one: float, other: float) -> None:
    cool, hot = sorted((one, other))
    warmer = price_of("edge", replace(conditions, temperature_c=hot))
    assert warmer >= price_of("edge", replace(conditions, temperature_c=cool))
    throttled, not_throttled = replace(conditions, throttled=True), replace(conditions, throttled=False)
    assert price_of("edge", throttled) >= price_of("edge", not_throttled)


@given(CONDITIONS, st.floats(1.0, 1e3), st.floats(1.0, 1e3))
def test_more_scarcity_is_never_cheaper(conditions: DeviceConditions, one: float, other: float) -> None:
    assert price_of("pool", conditions, min(one, other)) <= price_of("pool", conditions, max(one, other))


def twins(*, pool: bool = False) -> Fleet:
    fleet = fleet_of(edge_a=variant(compute_s=0.010), edge_b=variant(compute_s=0.020))
    return fleet_of(edge_a=variant(compute_s=0.010), pool_main=variant(compute_s=0.010)) if pool else fleet


def tell(fleet: Fleet, target_id: str, conditions: DeviceConditions) -> None:
    fleet.heard(target_id, load=None, doubt="", now=NOW, conditions=conditions)


def goes_to(fleet: Fleet, policy: type[Placer], **asked: int) -> str:
    decision = policy(fleet).decide(ask()._replace(**asked), NOW)
    assert decision.chosen is not None
    return decision.chosen.target.id


@pytest.mark.parametrize("policy", [Placer, UtilityPlacer])
def test_a_weak_device_leaves_its_work_to_a_slower_one_and_takes_it_back_when_it_charges(policy: type[Placer]) -> None:
    fleet = twins()
    assert goes_to(fleet, policy) == "edge/a"

    tell(fleet, "edge/a", DeviceConditions(battery=0.21))
    assert goes_to(fleet, policy) == "edge/b"
    tell(fleet, "edge/b", DeviceConditions(battery=0.21, throttled=True))
    assert goes_to(fleet, policy) == "edge/a"

    tell(fleet, "edge/a", DeviceConditions(battery=0.21, charging=True))
    assert goes_to(fleet, policy) == "edge/a"


def test_twins_whose_batteries_differ_by_a_little_still_share_the_work() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.010), edge_b=variant(compute_s=0.011))
    tell(fleet, "edge/a", DeviceConditions(battery=0.60))
    tell(fleet, "edge/b", DeviceConditions(battery=0.62))
    placer, went = Placer(fleet), []
    for key in range(6):
        candidate = placer.decide(ask(), NOW).chosen
        assert candidate is not None
        candidate.target.queue_estimate.launch(key, candidate.compute_s, NOW)
        went.append(candidate.target.id)
    assert sorted(went) == ["edge/a"] * 3 + ["edge/b"] * 3


@pytest.mark.parametrize("policy", [Placer, UtilityPlacer])
def test_large_bodies_stay_off_a_metered_link_and_small_ones_do_not(policy: type[Placer]) -> None:
    fleet = twins(pool=True)
    tell(fleet, "edge/a", DeviceConditions(metered=True))
    assert fleet.is_metered
    assert goes_to(fleet, policy, body_bytes=100, answer_bytes=100) == "edge/a"
    assert goes_to(fleet, policy, body_bytes=100, answer_bytes=40_000) == "pool/main"
    tell(fleet, "edge/a", UNTOLD)
    assert not fleet.is_metered
    assert goes_to(fleet, policy, body_bytes=100, answer_bytes=40_000) == "edge/a"


def test_the_cost_counts_bytes_both_ways() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.010))
    (offered,) = fleet.offered("minilm", "1")
    free = estimate(offered, 1.0, NOW, 3000, 2000).cost
    tell(fleet, "edge/a", DeviceConditions(metered=True))
    assert estimate(offered, 1.0, NOW, 3000, 2000).cost == pytest.approx(free + 5000 * METERED_BYTE)


def test_a_device_that_is_gone_is_metered_no_more() -> None:
    fleet = twins()
    tell(fleet, "edge/a", DeviceConditions(metered=True))
    fleet.remove("edge/a")
    assert not fleet.is_metered


def test_scarcity_makes_the_cloud_dearer_and_nobody_else() -> None:
    fleet = twins(pool=True)
    fleet.price_cloud(3.0)
    assert fleet.targets["pool/main"].price == 3.0 * TIER["pool"]
    assert fleet.targets["edge/a"].price == TIER["edge"]
    fleet.price_cloud(1.0)
    assert fleet.targets["pool/main"].price == TIER["pool"]


def test_a_device_that_takes_no_new_work_says_how_it_is() -> None:
    fleet = twins()
    fleet.heard("edge/a", load=None, doubt="", now=NOW, accepting=False, conditions=DeviceConditions(battery=0.1))
    assert fleet.targets["edge/a"].state(NOW) == ("down", "it takes no new work (battery at 10%)")

"""The door: who is let in, who is refused and why, and what a refused caller is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission.admission import LONGEST_S, SHORTEST_S, Admission, AdmissionRequest
from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.admission.tenants import TenantQuotas, TenantSpec
from tests.support.gateway.doors import admission_of
from tidegate.outcome import Overloaded

NOW = 1000.0


def who(tenant: str = "", priority: int = 0, asked: int = 0, share: float = 1.0) -> AdmissionRequest:
    return AdmissionRequest(tenant, priority, lambda: asked, lambda: share)


def swamp(door: Admission, now: float, *, loss: float = 0.5, for_s: float = 0.3) -> float:
    """Placements that all find queues longer than their slack; returns the instant after them."""
    until = now + for_s
    while now < until:
        now += 0.01
        door.placed(0.2, 2.0, loss)
        if door.enter(who(priority=1), now) is None:
            door.leave("", 0.1)
    return now


def test_everybody_comes_in_while_there_is_no_overload() -> None:
    door = admission_of()
    for asked in range(100):
        assert door.enter(who(priority=4, asked=asked), NOW + asked * 0.001) is None
    assert door.in_flight == 100
    assert "off" in repr(door)


def test_in_overload_the_least_important_are_refused_first_and_the_most_important_are_not() -> None:
    door, now = admission_of(), NOW
    refused = {1: 0, 4: 0}
    for asked in range(600):
        now += 0.005
        for priority in refused:
            if door.enter(who(priority=priority, asked=asked), now) is not None:
                refused[priority] += 1
                continue
            door.leave("", 0.1)
            door.placed(0.2, 2.0, 0.3 if priority == 4 else 0.02)  # the unimportant are what makes the queues too long
    assert door.overloaded()
    assert refused[4] > 100
    assert refused[1] == 0
    assert door.refused["shed"] == refused[4]


def test_overload_refuses_a_model_of_more_weight_less_often() -> None:
    door, now = admission_of(10_000), NOW
    refused = {0.2: 0, 1.0: 0, 5.0: 0}
    for asked in range(600):
        now += 0.005
        for share in refused:
            if door.enter(who(asked=asked, share=share), now) is not None:
                refused[share] += 1
                continue
            door.leave("", 0.1)
            door.placed(0.2, 2.0, 0.2)
    assert refused[0.2] > 1.5 * refused[1.0] > 1.5 * 1.5 * refused[5.0]


def test_a_retry_meets_the_same_refusal() -> None:
    door = admission_of(10_000)
    now = swamp(door, NOW)
    for asked in range(60):
        door.enter(who(priority=4, asked=asked), now)
    now = swamp(door, now, for_s=0.2)
    (shed, *_) = [asked for asked in range(60) if door.enter(who(priority=4, asked=asked), now)]
    assert [door.enter(who(priority=4, asked=shed), now) is None for _ in range(20)] == [False] * 20


def test_the_state_and_the_cut_are_left_when_the_queues_are_gone() -> None:
    told: list[tuple[bool, str]] = []
    door = Admission(
        AdaptiveLimit(1000), TenantQuotas(), draw=lambda: 0.5, on_change=lambda on, why: told.append((on, why))
    )
    now = swamp(door, NOW)
    for step in range(300):
        door.placed(0.0, 0.0, 0.0)
        if door.enter(who(), now + step * 0.01) is None:
            door.leave("", 0.01)
    assert not door.overloaded()
    assert [on for on, _ in told] == [True, False]
    assert all(why for _, why in told)
    assert door.enter(who(priority=4), now + 3.1) is None


def test_without_shedding_the_state_is_kept_and_nobody_is_refused_for_it() -> None:
    door = Admission(AdaptiveLimit(1000), TenantQuotas(), draw=lambda: 0.5, shed=False)
    now = swamp(door, NOW)
    assert door.overloaded()
    assert all(door.enter(who(priority=4, asked=asked), now) is None for asked in range(50))


def test_after_a_long_pause_nothing_of_the_overload_is_left() -> None:
    door = admission_of()
    now = swamp(door, NOW)
    assert door.rejection.rate > 0.0
    assert door.enter(who(priority=4), now + 3600.0) is None or door.enter(who(priority=4), now + 3602.0) is None
    assert door.rejection.rate == 0.0


def test_a_full_house_says_so_and_keeps_room_for_the_most_urgent() -> None:
    door = admission_of(1000)
    door.limit.limit = 10.0
    assert [door.enter(who(), NOW) is None for _ in range(11)] == [True] * 10 + [False]
    assert [door.enter(who(priority=1), NOW) is None for _ in range(6)] == [True] * 5 + [False]
    assert door.refused["full"] == 2


def test_a_tenant_pays_its_own_way_and_is_told_when_it_can_pay_again() -> None:
    door = admission_of(acme=TenantSpec(pool_s_per_s=0.5, edge_s_per_s=0.5, burst_s=1.0))
    acme = door.tenants.of("acme")
    acme.spend("pool", 2.0, NOW)
    assert door.enter(who("acme"), NOW) is None, "its edge-seconds are still there"
    acme.spend("edge", 3.0, NOW)
    refusal = door.enter(who("acme"), NOW)
    assert isinstance(refusal, Overloaded)
    assert refusal.message == "over-budget: tenant 'acme' has used up its compute"
    assert refusal.retry_after_s == pytest.approx(2.0 * 1.15)  # a debt of one second at half a second a second
    assert door.enter(who("acme"), NOW + 2.1) is None
    assert door.enter(who("somebody"), NOW) is None


@given(
    stays=st.lists(st.floats(0.0, 1e4), max_size=60),
    draw=st.floats(0.0, 1.0, exclude_max=True),
)
def test_what_a_refused_caller_is_told_is_whole_milliseconds_within_bounds(stays: list[float], draw: float) -> None:
    door = Admission(AdaptiveLimit(1), TenantQuotas(), draw=lambda: draw)
    for stay_s in stays:
        assert door.enter(who(), NOW) is None
        door.leave("", stay_s)
    assert door.enter(who(), NOW) is None
    refusal = door.enter(who(), NOW)
    assert refusal is not None and refusal.retry_after_s is not None
    assert SHORTEST_S <= refusal.retry_after_s <= LONGEST_S
    assert refusal.retry_after_s * 1e3 == pytest.approx(round(refusal.retry_after_s * 1e3))


def test_the_longer_requests_stay_the_later_refused_callers_are_sent_back() -> None:
    told = []
    for stay_s in (0.2, 2.0):
        door = admission_of(1)
        for _ in range(300):
            door.enter(who(), NOW)
            door.leave("", stay_s)
        door.enter(who(), NOW)
        refusal = door.enter(who(), NOW)
        assert refusal is not None
        told.append(refusal.retry_after_s)
    assert told == [pytest.approx(0.2 * 1.15, abs=0.002), pytest.approx(2.0 * 1.15, abs=0.002)]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["enter", "leave"]), st.sampled_from(["", "acme", "who?"])), max_size=80))
def test_no_counter_leaks_whoever_comes_and_goes(steps: list[tuple[str, str]]) -> None:
    door, inside = admission_of(20, acme=TenantSpec(max_in_flight=3)), []
    for at, (what, tenant) in enumerate(steps):
        if what == "enter" and door.enter(who(tenant), NOW + at) is None:
            inside.append(tenant)
        elif what == "leave" and inside:
            door.leave(inside.pop(), 0.1)
        assert door.in_flight == len(inside) <= 20
        assert door.tenants.of("acme").in_flight == inside.count("acme") <= 3
    for tenant in inside:
        door.leave(tenant, 0.1)
    assert all(quota.in_flight == 0 for quota in door.tenants.quotas.values())
    assert set(door.tenants.quotas) == {"acme", "default"}

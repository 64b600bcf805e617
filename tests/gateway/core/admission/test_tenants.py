"""Tenants' budgets in compute, the learned limit, and the gate that applies both to placements."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission.admission import AdmissionRequest
from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.admission.placement_guard import AdmissionGuard, queue_pressure
from gateway.core.admission.tenants import DEFAULT, JointQuota, TenantQuota, TenantQuotas, TenantSpec, TokenBucket
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.placer import Placer
from gateway.core.placement.utility import UtilityPlacer, queue_position
from gateway.core.request.attempt import AttemptTelemetry
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.hedging import Hedge
from tests.support.gateway.crossing import edge_and_pool
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tests.support.interpreted import interpreted_only
from tidegate.caller import Grant, Identity, UsageLimits
from tidegate.outcome import DeadlineExceeded, NothingAlive, Overloaded, Unreachable


def busy(fleet: Fleet, target_id: str, count: int, *, due_in_s: float) -> None:
    for key in range(count):
        fleet.targets[target_id].queue_estimate.launch(1000 + key, 0.1, NOW, queue_position(ask(budget_s=due_in_s)))


# buckets

COSTS = st.floats(0.0, 3.0, allow_subnormal=False)  # half of the least number there is would be waited for no time


@pytest.mark.slow
@given(
    st.floats(0.01, 5.0),
    st.floats(0.1, 5.0),
    st.lists(st.tuples(st.floats(0.0, 2.0), COSTS, COSTS), max_size=60),
)
def test_a_budget_is_never_negative_and_never_gives_more_than_it_took_in(
    rate: float, burst_s: float, spends: list[tuple[float, float, float]]
) -> None:
    bucket, now, granted_s, largest_s = TokenBucket(rate, burst_s), 0.0, 0.0, 0.0
    for gap_s, cost_s, actual_s in spends:
        now += gap_s
        if bucket.affords(cost_s, now):
            bucket.spend(cost_s, now)
            bucket.spend(actual_s - cost_s, now)  # settled
            granted_s += actual_s
            largest_s = max(largest_s, cost_s, actual_s)
        else:
            wait_s = bucket.wait_s(cost_s, now)
            assert 0.0 < wait_s < inf
        assert 0.0 <= bucket.available(now) <= burst_s
        assert granted_s <= rate * now + burst_s + 2.0 * largest_s + 1e-6


def test_who_waits_as_long_as_told_can_pay() -> None:
    bucket = TokenBucket(0.5, 1.0)
    bucket.spend(1.5, 0.0)
    assert not bucket.affords(0.2, 0.0)
    wait_s = bucket.wait_s(0.2, 0.0)
    assert wait_s == pytest.approx(1.4)
    assert bucket.affords(0.2, wait_s + 1e-9)
    assert bucket.affords(9.0, 100.0), "what is dearer than a burst runs when the bucket is full"


def test_a_rate_of_nothing_is_never_paid_and_an_endless_one_always() -> None:
    assert not TokenBucket(0.0, 1.0).affords(0.0, 9e9)
    assert TokenBucket(0.0, 1.0).wait_s(0.1, 5.0) == inf
    assert TokenBucket(inf, 1.0).affords(1e9, 0.0)
    assert TokenBucket(inf, 1.0).wait_s(1e9, 0.0) == 0.0
    assert repr(TokenBucket(0.5, 2.0)) == "<TokenBucket 2.000 of 2, 0.5 a second>"


@pytest.mark.slow
@given(st.lists(st.text(max_size=20), max_size=50))
def test_names_that_nobody_configured_share_one_purse(names: list[str]) -> None:
    tenants = TenantQuotas({"acme": TenantSpec(weight=3.0)})
    for name in names:
        assert tenants.of(name).name in ("acme", DEFAULT)
    assert len(tenants.quotas) == 2
    assert tenants.weight_of("acme") == 3.0
    assert tenants.weight_of("somebody") == 1.0


# the limit


def feed(limit: AdaptiveLimit, now: float, *, queue_s: float, windows: int, inside: int, dropped: int = 0) -> float:
    taken = [limit.try_acquire(urgent=True) for _ in range(inside)].count(True)
    for _ in range(windows):
        for _ in range(20):
            now += 0.006
            limit.answered(queue_s, 0.01, now)
        for _ in range(dropped):
            limit.dropped(now)
    for _ in range(taken):
        limit.release()
    return now


def test_the_limit_grows_while_it_is_used_and_queues_are_short() -> None:
    limit = AdaptiveLimit(1000, start=50)
    feed(limit, 0.0, queue_s=0.001, windows=30, inside=49)
    assert limit.limit > 80
    assert AdaptiveLimit(1000, start=50).limit == 50


def test_the_limit_falls_when_queues_grow_far_beyond_what_is_usual_but_not_below_its_floor() -> None:
    limit = AdaptiveLimit(1000, start=200)
    now = feed(limit, 0.0, queue_s=0.0, windows=5, inside=150)
    before = limit.limit
    now = feed(limit, now, queue_s=0.2, windows=3, inside=int(before))
    assert limit.limit < before
    for _ in range(60):
        now = feed(limit, now, queue_s=0.5, windows=1, inside=int(limit.limit))
    assert limit.floor <= limit.limit <= 60


def test_refusals_at_targets_lower_the_limit_even_without_queues() -> None:
    limit = AdaptiveLimit(1000, start=200)
    feed(limit, 0.0, queue_s=0.0, windows=10, inside=190, dropped=5)
    assert limit.limit < 200


def test_a_limit_that_is_not_used_stays_as_it_is() -> None:
    limit = AdaptiveLimit(1000, start=200)
    feed(limit, 0.0, queue_s=0.5, windows=20, inside=20)
    assert limit.limit == 200


def test_queues_that_grow_while_fewer_are_inside_are_somebody_elses() -> None:
    limit, now = AdaptiveLimit(1000, start=100), 0.0
    for turn in range(20):
        now = feed(limit, now, queue_s=0.002 * turn, windows=1, inside=100 - turn)
    held = limit.limit
    feed(limit, now, queue_s=0.5, windows=1, inside=int(held / 2) + 5)
    assert limit.limit == held


def test_a_fixed_limit_stays_at_its_cap_and_one_for_nobody_is_an_error() -> None:
    limit = AdaptiveLimit(300, fixed=True)
    feed(limit, 0.0, queue_s=0.5, windows=20, inside=300)
    assert repr(limit) == "<AdaptiveLimit 0/300 in flight, at most 300>"
    with pytest.raises(ValueError, match="at least one"):
        AdaptiveLimit(0)


def test_as_many_are_let_in_as_targets_generate_at_a_time_however_few_have_ended() -> None:
    slots = 0
    limit = AdaptiveLimit(1000, start=50, slots=lambda: slots)
    assert [limit.try_acquire() for _ in range(60)].count(True) == 50
    slots = 500  # a pool came
    assert [limit.try_acquire() for _ in range(1000)].count(True) == 500 - 50
    slots = 5000
    assert [limit.try_acquire() for _ in range(1000)].count(True) == 1000 - 500, "and never more than the cap"


@pytest.mark.slow
@given(
    st.integers(1, 400),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 0.1), st.integers(0, 400), st.integers(0, 5)), max_size=40),
)
def test_the_limit_stays_between_its_floor_and_its_cap(cap: int, windows: list[tuple[float, float, int, int]]) -> None:
    limit, now = AdaptiveLimit(cap, targets=lambda: 3), 0.0
    for queue_s, compute_s, wanted, dropped in windows:
        taken = [limit.try_acquire(urgent=True) for _ in range(wanted)].count(True)
        assert limit.in_flight <= min(cap, 1.5 * limit.limit)
        for _ in range(10):
            now += 0.02
            limit.answered(queue_s, compute_s, now)
        for _ in range(dropped):
            limit.dropped(now)
        for _ in range(taken):
            limit.release()
        assert min(limit.floor, cap) <= limit.limit <= cap


# the gate


def test_who_cannot_pay_for_the_cheapest_place_gets_the_other_and_who_can_pay_for_none_is_told_when() -> None:
    fleet = fleet_of(edge_a=variant("int8"), pool_main=variant("fp32", compute_s=0.02))
    door = admission_of(acme=TenantSpec(edge_s_per_s=0.1, pool_s_per_s=0.1, burst_s=0.5))
    gate, quota = AdmissionGuard(Placer(fleet), fleet, door), door.tenants.of("acme")
    assert gate.fleet is fleet
    acme = ask()._replace(tenant="acme")

    def place() -> str:
        decision = gate.decide(acme, NOW)
        return decision.chosen.target.id if decision.chosen else str(decision.refusal)

    assert place() == "edge/a"
    quota.spend("edge", 0.6, NOW)
    assert place() == "pool/main"
    quota.spend("pool", 0.6, NOW)
    assert place() == "over-budget: tenant 'acme' has used up its compute"
    assert gate.decide(ask(), NOW).chosen is not None, "others are not concerned"


def test_a_credential_with_limits_that_acts_for_another_tenant_pays_compute_of_its_own_too() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.01))
    door = admission_of(acme=TenantSpec(edge_s_per_s=1e-9, burst_s=1.0))
    own = door.tenants.quotas["proxy#key:p"] = TenantQuota("proxy#key:p", TenantSpec(edge_s_per_s=1e-9, burst_s=0.5))
    gate, acme = AdmissionGuard(Placer(fleet), fleet, door), door.tenants.of("acme")
    asked = ask()._replace(tenant="acme", also_pays="proxy#key:p")
    chosen = gate.decide(asked, NOW).chosen
    assert chosen is not None
    AttemptTelemetry(chosen, 1, 16.0, NOW).answered({"queue": 0.0, "compute": 0.04}, None, NOW + 0.05)
    left_s = [one.buckets["edge"].available(NOW + 0.05) for one in (own, acme)]
    assert left_s == pytest.approx([0.46, 0.96])
    own.spend("edge", 0.6, NOW + 0.05)
    refusal = gate.decide(asked, NOW + 0.05).refusal
    assert refusal is not None and "tenant 'proxy#key:p' has used up its compute" in str(refusal)
    missed = [(one.buckets["edge"].missed > 0.0, one.buckets["edge"].largest_missed > 0.0) for one in (own, acme)]
    assert missed == [(True, True), (False, False)], "what the tenant could have paid needs no larger share"
    assert gate.decide(asked._replace(also_pays=""), NOW + 0.05).chosen is not None, "others of the tenant go on"


@pytest.mark.parametrize("short", ["proxy#key:p", "proxy", "acme"])
def test_the_door_names_the_one_of_those_that_pay_together_whose_compute_or_places_are_used_up(short: str) -> None:
    little = TenantSpec(edge_s_per_s=0.5, pool_s_per_s=0.5, burst_s=1.0, max_in_flight=2)
    door = admission_of(acme=little, proxy=little)
    tenants, limits = door.tenants, UsageLimits(edge_s_per_s=0.5, pool_s_per_s=0.5, max_in_flight=2)
    tenants.of_identity(Identity("key:p", Grant("proxy", limits=limits)))
    asked = AdmissionRequest("acme", 0, lambda: 1, also_pays="proxy#key:p")
    lacks = TenantQuota("", little)  # spends nothing of the quota around it
    lacks.buckets, lacks.in_flight = tenants.quotas[short].buckets, 2
    for tier in ("edge", "pool"):
        lacks.spend(tier, 1.5, NOW)

    refusal = door.enter(asked, NOW)
    assert refusal is not None and f"tenant {short!r} has used up its compute" in refusal.message
    tenants.quotas[short].in_flight = 2
    refusal = door.enter(asked, NOW)
    assert refusal is not None and f"tenant {short!r} has 2 requests in flight, its limit" in refusal.message
    assert repr(tenants.paying("acme", "proxy#key:p")) == "<JointQuota of proxy#key:p, proxy, acme>"


def test_requests_and_tokens_are_missed_where_they_were_short_and_nowhere_else() -> None:
    own = TenantQuota("proxy", TenantSpec(requests_per_s=1.0, tokens_per_s=1.0))
    other = TenantQuota("acme", TenantSpec(requests_per_s=9.0, tokens_per_s=9.0, bytes_per_s=10.0))
    both = JointQuota(own, other)
    assert (both.ask(NOW), both.reserve(60, NOW)) == (0.0, 0.0)
    assert both.ask(NOW) > 0.0 and both.reserve(30, NOW) > 0.0
    assert (both.lacks_requests(NOW), both.lacks_tokens(30, NOW)) == (own, own)
    assert [(one.requests.missed, one.tokens.missed) for one in (own, other)] == [(1.0, 30.0), (0.0, 0.0)]

    other.carry(100, NOW)
    assert both.ask(NOW + 1.0) > 0.0 and both.lacks_requests(NOW + 1.0) is other, "bytes are owed there"
    assert (own.requests.missed, other.requests.missed) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("end", "left_s"), [("answered", 0.96), ("refused", 1.0), ("failed", 1.0), ("cancelled", 0.99)]
)
def test_an_attempt_is_charged_what_it_took_and_nothing_when_it_was_refused(end: str, left_s: float) -> None:
    door = admission_of(acme=TenantSpec(edge_s_per_s=1e-9, burst_s=1.0))
    fleet = fleet_of(edge_a=variant(compute_s=0.01))
    gate = AdmissionGuard(UtilityPlacer(fleet), fleet, door)
    decision = gate.decide(ask()._replace(tenant="acme"), NOW)
    assert decision.chosen is not None and decision.chosen.observer is not None
    attempt, bucket = AttemptTelemetry(decision.chosen, 1, 16.0, NOW), door.tenants.of("acme").buckets["edge"]
    charged_s = 1.0 - bucket.available(NOW)
    assert charged_s == pytest.approx(decision.chosen.compute_s)
    match end:
        case "answered":
            attempt.answered({"queue": 0.0, "compute": 0.04}, None, NOW + 0.05)
        case "refused":
            attempt.failed(Overloaded("full"), NOW + 0.05, 0.5)
        case "failed":
            attempt.failed(Unreachable("gone"), NOW + 0.05, 0.5)
        case _:
            attempt.cancelled(NOW + 0.05)
    assert bucket.available(NOW + 0.05) == pytest.approx(1.0 - charged_s if end == "cancelled" else left_s, abs=1e-6)


def overloaded_gate(**extra: float) -> tuple[AdmissionGuard, float]:
    fleet = fleet_of(edge_a=variant(compute_s=0.1))
    busy(fleet, "edge/a", 20, due_in_s=9.0)
    door = admission_of()
    door.overload.on = True
    return AdmissionGuard(UtilityPlacer(fleet), fleet, door), NOW


def test_in_overload_who_has_no_chance_is_refused_at_once_and_not_before() -> None:
    gate, now = overloaded_gate()
    hopeless = ask(budget_s=0.2)._replace(priority=4)
    refusal = gate.decide(hopeless, now).refusal
    assert isinstance(refusal, Overloaded)
    assert refusal.message.startswith("hopeless: its chance to be in time is")
    assert gate.admission.refused["hopeless"] == 1
    gate.admission.overload.on = False
    assert not isinstance(gate.decide(hopeless, now).refusal, Overloaded)


def test_in_overload_who_takes_more_from_others_than_it_is_worth_is_refused() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.1))
    busy(fleet, "edge/a", 6, due_in_s=0.75)
    door = admission_of()
    door.overload.on = True
    gate = AdmissionGuard(UtilityPlacer(fleet), fleet, door)
    refusal = gate.decide(ask(budget_s=0.6)._replace(weight=0.05), NOW).refusal
    assert isinstance(refusal, Overloaded)
    assert "more from others" in refusal.message


def test_nobody_is_refused_for_the_sake_of_those_who_are_still_to_come() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.1))
    fleet.targets["edge/a"].queue_estimate.congestion.sent(9.0, NOW)
    door = admission_of()
    door.overload.on = True
    decision = AdmissionGuard(UtilityPlacer(fleet), fleet, door).decide(ask()._replace(weight=0.05), NOW)
    (judged,) = decision.judged
    assert judged is not None
    assert judged.value < 0.0 < judged.worth, "its rent is more than it is worth"
    assert decision.chosen is not None


def test_a_second_attempt_is_not_judged_again_and_nobody_left_is_said_as_before() -> None:
    gate, now = overloaded_gate()
    assert isinstance(gate.decide(ask(), now, ["edge/a"]).refusal, NothingAlive)
    assert gate.admission.refused["hopeless"] == 0


def test_refusals_for_want_of_time_are_the_queues_fault_only_where_there_was_one() -> None:
    for queued, lost in ((0, 0.0), (8, 1.0)):
        fleet = fleet_of(edge_a=variant(compute_s=0.1))
        busy(fleet, "edge/a", queued, due_in_s=9.0)
        door = admission_of()
        chosen = AdmissionGuard(Placer(fleet), fleet, door).decide(ask(budget_s=2.0), NOW).chosen
        assert chosen is not None
        assert (queue_pressure(chosen, 2.0) > 0.25) == bool(queued)
        AttemptTelemetry(chosen, 99, 16.0, NOW).failed(DeadlineExceeded("late"), NOW + 0.1, 0.5)
        assert door.overload.lost == lost


@pytest.mark.parametrize("again", [False, True])
def test_after_a_connection_that_ended_an_attempt_tells_of_a_full_queue_and_of_nothing_else(again: bool) -> None:
    """The time that it lacks went by elsewhere: with a link that was reset, or in another target's queue."""
    fleet = fleet_of(edge_a=variant(compute_s=0.1))
    busy(fleet, "edge/a", 8, due_in_s=9.0)
    door = admission_of()
    chosen = AdmissionGuard(Placer(fleet), fleet, door).decide(ask(budget_s=2.0)._replace(again=again), NOW).chosen
    assert chosen is not None and chosen.observer is not None
    chosen.observer.refused(NOW, full=False)
    chosen.observer.cancelled(NOW + 2.0)
    chosen.observer.answered(1.0, None, NOW + 2.1)
    assert door.overload.lost == (0.0 if again else 3.0)
    chosen.observer.refused(NOW, full=True)
    assert door.overload.lost == (1.0 if again else 4.0)


def test_in_overload_nobody_is_shed_whose_connection_ended() -> None:
    gate, now = overloaded_gate()
    hopeless = next(one for one in (ask(at=now, budget_s=0.02 * n) for n in range(1, 20))
                    if isinstance(gate.decide(one, now).refusal, Overloaded))  # fmt: skip
    assert not isinstance(gate.decide(hopeless._replace(again=True), now).refusal, Overloaded)


def test_a_queue_with_no_time_to_spare_is_all_strain() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.1))
    busy(fleet, "edge/a", 2, due_in_s=9.0)
    chosen = AdmissionGuard(Placer(fleet), fleet, admission_of()).decide(ask(budget_s=2.0), NOW).chosen
    assert chosen is not None
    assert queue_pressure(chosen, 0.05) == inf


def test_hedges_are_off_while_the_door_says_overloaded() -> None:
    door, scene = admission_of(), edge_and_pool()
    scene.crossing = ChanceHedging(scene.placer, overloaded=door.overloaded)
    assert scene.plan(after_s=0.5) == Hedge(NOW + 0.5)
    door.overload.on = True
    assert scene.plan(after_s=0.5) is None


# Requests and bytes, and purses within purses


def test_requests_are_paid_for_one_by_one_and_the_wait_is_until_the_next() -> None:
    quota = TenantQuota("acme", TenantSpec(requests_per_s=2.0))
    assert [quota.ask(NOW) for _ in range(3)] == [0.0, 0.0, pytest.approx(0.5)]
    assert quota.ask(NOW + 0.5) == 0.0


def test_less_than_one_request_a_second_still_comes_to_one_now_and_then() -> None:
    quota = TenantQuota("acme", TenantSpec(requests_per_s=0.1))
    assert [quota.ask(NOW), quota.ask(NOW)] == [0.0, pytest.approx(10.0)]


def test_bytes_may_be_owed_and_are_asked_for_first() -> None:
    quota = TenantQuota("acme", TenantSpec(bytes_per_s=100.0))
    assert quota.ask(NOW) == 0.0
    quota.carry(300, NOW)
    assert quota.ask(NOW) == pytest.approx(2.0)
    assert quota.ask(NOW + 2.0) == 0.0


def test_a_minutes_tokens_may_be_reserved_at_once_and_what_was_not_made_is_given_back() -> None:
    quota = TenantQuota("acme", TenantSpec(tokens_per_s=10.0))
    assert [quota.reserve(400, NOW), quota.reserve(400, NOW)] == [0.0, pytest.approx(20.0)]
    quota.settle(300, NOW)
    assert quota.reserve(400, NOW) == 0.0
    assert quota.reserve(5000, NOW + 49.9) > 0.0
    assert quota.reserve(5000, NOW + 50.0) == 0.0, "more than a burst is let in where the bucket is full"


def test_a_purse_within_another_spends_from_both_and_the_tighter_one_counts() -> None:
    tenants = TenantQuotas({"acme": TenantSpec(requests_per_s=3.0, max_in_flight=2)})
    tight = tenants.of_identity(
        Identity("key:1", Grant("acme", limits=UsageLimits(requests_per_s=1.0, max_in_flight=1)))
    )
    wide = tenants.of_identity(Identity("key:2", Grant("acme", limits=UsageLimits(requests_per_s=9.0))))

    assert [tight.ask(NOW) > 0, tight.ask(NOW) > 0] == [False, True]
    assert [wide.ask(NOW) > 0 for _ in range(3)] == [False, False, True], "the tenant's three are spent"

    tight.enter()
    assert (tight.has_place(), wide.has_place()) == (False, True)
    wide.enter()
    assert not wide.has_place()
    wide.leave()
    tight.leave()
    assert tenants.of("acme").in_flight == 0


def test_compute_of_a_purse_within_is_refunded_to_both() -> None:
    tenants = TenantQuotas({"acme": TenantSpec(pool_s_per_s=1.0)})
    inner = tenants.of_identity(Identity("key:1", Grant("acme", limits=UsageLimits(pool_s_per_s=0.5))))
    inner.spend("pool", 1.0, NOW)
    assert not inner.affords("pool", 0.5, NOW)
    assert inner.wait_s("pool", 0.5, NOW) == pytest.approx(1.0)
    inner.spend("pool", -1.0, NOW)
    assert inner.affords("pool", 0.5, NOW)
    assert tenants.of("acme").spent_s["pool"] == 0.0


def test_who_is_authenticated_has_a_purse_as_large_as_the_default_one_but_its_own() -> None:
    tenants = TenantQuotas({"default": TenantSpec(requests_per_s=1.0)})
    a, b = (tenants.of_identity(Identity("key:1", Grant(name))) for name in ("a", "b"))
    assert [a.ask(NOW) > 0, a.ask(NOW) > 0, b.ask(NOW) > 0] == [False, True, False]


def test_changed_limits_take_effect_while_requests_are_inside() -> None:
    tenants = TenantQuotas()
    quota = tenants.of_identity(Identity("key:1", Grant("a", limits=UsageLimits(max_in_flight=1))))
    quota.enter()
    again = tenants.of_identity(Identity("key:1", Grant("a", limits=UsageLimits(max_in_flight=2))))
    assert again is quota
    assert quota.has_place()
    quota.leave()
    assert quota.in_flight == 0


@interpreted_only
def test_purses_are_bounded_and_whoever_is_new_then_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.core.admission.tenants.MAX_QUOTAS", 2)
    tenants = TenantQuotas()
    known = tenants.known("a")
    assert tenants.known("b") is tenants.of("default")
    assert tenants.of_identity(Identity("key:1", Grant("a", limits=UsageLimits(max_in_flight=1)))) is known
    assert tenants.paying("a", "a#key:1") is known
    for acts_for, name, payer in (("default", "a", known), ("a", "unheard", tenants.of("default"))):
        joint = tenants.paying(acts_for, f"{name}#key:1")
        joint.enter()
        assert payer.in_flight == 1, "its tenant pays in its place"
        joint.leave()

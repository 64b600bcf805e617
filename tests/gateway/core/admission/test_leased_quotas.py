"""What gateways lease from one bucket adds up to the quota, whatever callers and the store do; on virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.admission.leased_quotas import LeaseClaim, LeasedQuotas, QuotaLoan
from gateway.core.admission.shared_quotas import SharedQuotas
from gateway.core.admission.tenants import TenantQuotas, TenantSpec
from gateway.core.peers.fair_share import QuotaUse
from gateway.core.peers.peers import PeerReport

LEASE_S = 0.2


class Bucket:
    """The script's rule for one limit (`gateway/store/quota_leaser.py`)."""

    def __init__(self) -> None:
        self.balance: float | None = None
        self.at = 0.0

    def lend(self, claim: LeaseClaim, now: float) -> QuotaLoan:
        if self.balance is None:
            balance = claim.start
        else:
            balance = min(claim.burst, self.balance + claim.rate * (now - self.at))
            balance = min(balance, claim.ceiling) if claim.ceiling >= 0.0 else balance
        balance = min(claim.burst, balance + claim.back)
        granted = max(0.0, min(claim.want, balance))
        self.balance, self.at = balance - granted, now
        return QuotaLoan(granted, self.balance)


class LeasingGateways:
    """Gateways with one tenant and one store, whose callers come at random.

    Args:
        store_s: the least and the most that a lease takes; the store does its part anywhere in between.
    """

    def __init__(
        self, count: int, spec: TenantSpec, seed: int = 1, store_s: tuple[float, float] = (0.001, 0.02)
    ) -> None:
        self.tenants = [TenantQuotas({"acme": spec}) for _ in range(count)]
        self.shared = [SharedQuotas(one) for one in self.tenants]
        self.leased = [LeasedQuotas(one, two, LEASE_S) for one, two in zip(self.tenants, self.shared, strict=True)]
        self.store: dict[tuple[str, str], Bucket] = {}
        self.is_away = False
        self.cut_off: set[int] = set()  # from the store; the others hear that each of them uses its part
        self.asked_at: list[float] = []
        self.turns = 0
        self.now = 0.0
        self._draw = random.Random(seed)
        self._store_s = store_s
        self._due = [self._draw.random() * LEASE_S for _ in range(count)]
        self._reports: list[PeerReport] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._at(0.0, self._take)
        for place in range(count):
            self._at(self._due[place], partial(self._look, place))

    def run(self, seconds: float, rates: list[float], ask: Callable[[int, float], bool]) -> list[tuple[float, int]]:
        """When and where requests were served."""
        served: list[tuple[float, int]] = []
        until = self.now + seconds

        def call(place: int) -> None:
            if self.now < until:
                self.asked_at.append(self.now)
                if ask(place, self.now):
                    served.append((self.now, place))
                self._at(self.now + self._draw.expovariate(rates[place]), partial(call, place))

        for place, one in enumerate(rates):
            if one:
                self._at(self.now + self._draw.expovariate(one), partial(call, place))
        while self._events[0][0] < until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until
        return served

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), act))

    def _take(self) -> None:
        self._reports = [
            PeerReport({name: dict(kinds) for name, kinds in one.take(self.now).items()}) for one in self.shared
        ]
        for place, shared in enumerate(self.shared):
            shared.divide([one for other, one in enumerate(self._reports) if other != place], 0, self.now)
        self._at(self.now + 0.2, self._take)

    def _look(self, place: int) -> None:
        """As the leaser does: a turn where one is due, an early one where a bucket runs short, or neither."""
        leased = self.leased[place]
        is_due = self.now >= self._due[place]
        if self.is_away or place in self.cut_off:
            leased.lost(self.now)
        elif is_due or leased.runs_short:
            ask = leased.ask if is_due else leased.ask_early
            claims = ask(self.now, len(self.leased), [self._reports[one] for one in self.cut_off])
            took_s = self._draw.uniform(*self._store_s)
            self.turns += 1
            self._at(self.now + took_s * self._draw.random(), partial(self._lend, place, claims, self.now + took_s))
            return
        self._rest(place)

    def _lend(self, place: int, claims: list[LeaseClaim], back_at: float) -> None:
        buckets = [self.store.setdefault((one.quota, one.kind), Bucket()) for one in claims]
        loans = [one.lend(claim, self.now) for one, claim in zip(buckets, claims, strict=True)]
        self._at(back_at, partial(self._lent, place, claims, loans))

    def _lent(self, place: int, claims: list[LeaseClaim], loans: list[QuotaLoan]) -> None:
        self.leased[place].lent(claims, loans, self.now)
        self._rest(place)

    def _rest(self, place: int) -> None:
        if self.now >= self._due[place]:
            self._due[place] = self.now + LEASE_S * (0.8 + 0.4 * self._draw.random())
        self._at(min(self._due[place], self.now + LEASE_S / 8), partial(self._look, place))

    def asks(self, number: int, now: float) -> bool:
        return self.tenants[number].of("acme").ask(now) <= 0.0

    def generates(self, number: int, now: float) -> bool:
        quota = self.tenants[number].of("acme")
        if quota.reserve(100, now) > 0.0:
            return False
        quota.settle(40, now)
        return True


def rate(served: list[tuple[float, int]], since: float, until: float) -> float:
    return sum(since <= at < until for at, _ in served) / (until - since)


@pytest.mark.parametrize("seed", range(3))
def test_a_quota_over_four_gateways_skewed_ten_to_one_is_kept_within_a_fiftieth(seed: int) -> None:
    gateways = LeasingGateways(4, TenantSpec(requests_per_s=100.0), seed)
    served = gateways.run(23.0, [200.0, 20.0, 20.0, 20.0], gateways.asks)
    for since in (3.0, 13.0):
        assert rate(served, since, since + 10.0) == pytest.approx(100.0, rel=0.02)
    of_small = sum(place > 0 for at, place in served if at > 3.0) / 20.0
    assert of_small >= 45.0, "those of which little is asked get most of it"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    skew=st.sampled_from([1.0, 2.0, 5.0, 10.0, 20.0, 30.0]),
    load=st.sampled_from([1.5, 2.0, 4.0]),
    store_s=st.sampled_from([(0.001, 0.001), (0.001, 0.02), (0.02, 0.02)]),
    seed=st.integers(0, 10_000),
)
def test_what_is_asked_beyond_the_quota_is_granted_to_three_hundredths_whatever_the_skew(
    skew: float, load: float, store_s: tuple[float, float], seed: int
) -> None:
    gateways = LeasingGateways(4, TenantSpec(requests_per_s=60.0), seed, store_s)
    rates = [load * 60.0 * part / (skew + 3.0) for part in (skew, 1.0, 1.0, 1.0)]
    served = gateways.run(15.0, rates, gateways.asks)
    assert rate(served, 5.0, 15.0) == pytest.approx(60.0, rel=0.03)


@pytest.mark.parametrize("skew", [1.0, 10.0, 30.0])
def test_of_a_tenant_that_asks_for_less_than_its_quota_almost_nothing_is_refused(skew: float) -> None:
    gateways = LeasingGateways(4, TenantSpec(requests_per_s=60.0))
    rates = [0.8 * 60.0 * part / (skew + 3.0) for part in (skew, 1.0, 1.0, 1.0)]
    served = gateways.run(30.0, rates, gateways.asks)
    assert len(served) >= 0.99 * len(gateways.asked_at)
    assert gateways.turns <= 2.0 * 4 * 30.0 / LEASE_S, "early turns are no more than the others"


def test_where_the_store_has_no_more_nothing_is_asked_early() -> None:
    gateways = LeasingGateways(4, TenantSpec(requests_per_s=60.0))
    gateways.run(5.0, [100.0] * 4, gateways.asks)
    before = gateways.turns
    gateways.run(20.0, [100.0] * 4, gateways.asks)
    assert gateways.turns - before <= 1.05 * 4 * 20.0 / LEASE_S


def test_early_only_what_runs_short_is_asked_for() -> None:
    tenants = TenantQuotas({name: TenantSpec(requests_per_s=100.0) for name in ("acme", "idle")})
    leased = LeasedQuotas(tenants, SharedQuotas(tenants), LEASE_S)
    claims = leased.ask(0.0, 2)
    leased.lent(claims, [QuotaLoan(one.want, 1.0) for one in claims], 0.0)
    assert not leased.runs_short
    bucket = tenants.of("acme").requests
    bucket.spend(0.3 * bucket.balance, 0.01)
    assert leased.runs_short
    (claim,) = leased.ask_early(0.01, 2)
    assert claim.quota == "acme" and claim.want == pytest.approx(25.0 - bucket.balance, rel=1e-3)
    leased.lent([claim], [QuotaLoan(0.5 * claim.want, 0.0)], 0.02)
    assert not leased.runs_short, "the store has no more"


def test_what_is_to_be_held_no_more_is_not_asked_for_early() -> None:
    tenants = TenantQuotas({"acme": TenantSpec(requests_per_s=100.0)})
    leased = LeasedQuotas(tenants, SharedQuotas(tenants), LEASE_S)
    bucket = tenants.of("acme").requests
    bucket.miss(60.0)  # a large request was refused
    claims = leased.ask(0.0, 2)
    leased.lent(claims, [QuotaLoan(one.want, 1.0) for one in claims], 0.0)
    bucket.largest_missed = 0.0
    bucket.spend(0.5 * bucket.balance, 0.01)
    assert leased.runs_short and leased.ask_early(0.01, 2) == []
    assert not leased.runs_short


def lend_all(leased: LeasedQuotas, claims: list[LeaseClaim], now: float) -> None:
    leased.lent(claims, [QuotaLoan(one.want, 1.0) for one in claims], now)


@pytest.mark.parametrize("changes", ["before it asks", "while it asks"])
def test_limits_that_change_while_a_bucket_runs_short_give_no_burst_beside_the_stores(changes: str) -> None:
    tenants = TenantQuotas({"acme": TenantSpec(requests_per_s=100.0)})
    leased, quota = LeasedQuotas(tenants, SharedQuotas(tenants), LEASE_S), tenants.of("acme")
    lend_all(leased, leased.ask(0.0, 2), 0.0)
    quota.requests.spend(0.5 * quota.requests.balance, 0.01)
    assert leased.runs_short
    claims = leased.ask_early(0.01, 2) if changes == "while it asks" else []
    quota.change(TenantSpec(requests_per_s=200.0))
    claims = claims or leased.ask_early(0.01, 2)
    assert bool(claims) is (changes == "while it asks")
    lend_all(leased, claims, 0.02)
    assert not leased.runs_short

    (claim,) = leased.ask(0.2, 2)
    assert claim.ceiling == pytest.approx(100.0), "the store is to have no more than half of the burst that is here"
    lend_all(leased, [claim], 0.21)
    assert quota.requests.leased
    assert quota.requests.balance == pytest.approx(claim.want), "the burst that it had is paid for"


@pytest.mark.parametrize("changes", ["before it asks", "while it asks"])
def test_a_limit_that_is_gone_is_not_asked_for_early_for_ever(changes: str) -> None:
    tenants = TenantQuotas({"acme": TenantSpec(requests_per_s=100.0)})
    leased, quota = LeasedQuotas(tenants, SharedQuotas(tenants), LEASE_S), tenants.of("acme")
    lend_all(leased, leased.ask(0.0, 2), 0.0)
    quota.requests.spend(0.5 * quota.requests.balance, 0.01)
    claims = leased.ask_early(0.01, 2) if changes == "while it asks" else []
    quota.change(TenantSpec())
    lend_all(leased, claims or leased.ask_early(0.01, 2), 0.02)
    assert not leased.runs_short


def test_the_quota_is_kept_while_the_skew_jumps_every_second() -> None:
    gateways = LeasingGateways(4, TenantSpec(requests_per_s=100.0))
    served = []
    for second in range(14):
        rates = [10.0] * 4
        rates[second % 4] = 200.0
        served += gateways.run(1.0, rates, gateways.asks)
    assert rate(served, 2.0, 14.0) == pytest.approx(100.0, rel=0.05)


def test_never_more_than_the_rate_and_one_burst_is_granted() -> None:
    gateways = LeasingGateways(4, TenantSpec(requests_per_s=50.0))
    gateways.run(3.0, [0.0] * 4, gateways.asks)  # full
    served = gateways.run(5.0, [300.0] * 4, gateways.asks)
    assert 50.0 * 5.0 <= len(served) <= 50.0 * 5.0 + 50.0 + 4 * 1.0


def test_a_gateway_that_was_silent_answers_its_first_request_at_once() -> None:
    gateways = LeasingGateways(4, TenantSpec(requests_per_s=4.0))
    gateways.run(10.0, [20.0, 0.0, 0.0, 0.0], gateways.asks)
    assert all(gateways.asks(number, gateways.now) for number in (1, 2, 3))


def test_with_a_store_that_dies_no_more_than_a_fifth_over_the_quota_is_granted() -> None:
    gateways = LeasingGateways(4, TenantSpec(requests_per_s=100.0))
    rates = [200.0, 20.0, 20.0, 20.0]
    gateways.run(5.0, rates, gateways.asks)
    gateways.is_away = True
    served = gateways.run(10.0, rates, gateways.asks)
    assert 0.85 <= rate(served, 5.0, 15.0) / 100.0 <= 1.2


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [True, False])
def test_a_store_that_comes_back_full_or_empty_lends_no_second_burst(forgets: bool) -> None:
    gateways = LeasingGateways(4, TenantSpec(tokens_per_s=6000.0))  # the burst is a minute's worth
    rates = [100.0, 100.0, 100.0, 100.0]
    gateways.run(90.0, rates, gateways.generates)  # the burst is spent
    for _ in range(3):
        gateways.is_away = True
        gateways.run(5.0, rates, gateways.generates)
        gateways.is_away = False
        if forgets:
            gateways.store.clear()
        served = gateways.run(10.0, rates, gateways.generates)
        assert rate(served, gateways.now - 10.0, gateways.now) <= 1.1 * 6000.0 / 60.0


@pytest.mark.slow
def test_a_store_that_is_flushed_while_gateways_lease_lends_no_second_burst() -> None:
    gateways = LeasingGateways(2, TenantSpec(tokens_per_s=6000.0))
    gateways.run(90.0, [200.0, 200.0], gateways.generates)
    gateways.store.clear()
    served = gateways.run(10.0, [200.0, 200.0], gateways.generates)
    assert rate(served, gateways.now - 10.0, gateways.now) == pytest.approx(100.0, rel=0.05)


def test_a_gateway_cut_off_from_the_store_alone_spends_its_part_and_the_others_the_rest() -> None:
    gateways = LeasingGateways(4, TenantSpec(requests_per_s=100.0))
    rates = [200.0, 20.0, 20.0, 20.0]
    gateways.run(5.0, rates, gateways.asks)
    gateways.cut_off = {0}
    gateways.run(3.0, rates, gateways.asks)
    served = gateways.run(10.0, rates, gateways.asks)
    assert rate(served, 8.0, 18.0) / 100.0 == pytest.approx(1.0, abs=0.1)


def test_what_a_gateway_does_not_use_any_more_goes_back() -> None:
    gateways = LeasingGateways(2, TenantSpec(tokens_per_s=1000.0))
    gateways.run(2.0, [0.0, 0.0], gateways.generates)
    bucket = gateways.tenants[0].of("acme").tokens
    bucket.deposit(50_000.0)
    (claim,) = gateways.leased[0].ask(gateways.now, 2)
    assert claim.want == 0.0 and claim.back == pytest.approx(bucket.balance - 15_000.0)


@pytest.mark.slow
def test_a_request_that_costs_more_than_is_held_is_granted_the_next_time() -> None:
    gateways = LeasingGateways(16, TenantSpec(tokens_per_s=100.0))
    gateways.run(30.0, [0.0] * 16, gateways.generates)
    quota = gateways.tenants[0].of("acme")
    assert quota.reserve(2000, gateways.now) > 0.0
    gateways.run(1.0, [0.0] * 16, gateways.generates)
    assert quota.reserve(2000, gateways.now) == 0.0


def test_many_quotas_take_turns() -> None:
    tenants = TenantQuotas({f"t{number}": TenantSpec(requests_per_s=10.0) for number in range(600)})
    leased = LeasedQuotas(tenants, SharedQuotas(tenants), LEASE_S)
    seen: set[str] = set()
    for turn in range(3):
        claims = leased.ask(turn * LEASE_S, 2)
        leased.lent(claims, [QuotaLoan(one.want, 1.0) for one in claims], turn * LEASE_S)
        seen |= {one.quota for one in claims}
    assert len(seen) == 600
    assert leased.ask(1.0, 2) == [], "what is full asks for nothing"


def test_one_that_lives_and_says_nothing_is_taken_to_spend_its_equal_part() -> None:
    tenants = TenantQuotas({"acme": TenantSpec(requests_per_s=100.0)})
    leased = LeasedQuotas(tenants, SharedQuotas(tenants), LEASE_S)
    report = PeerReport({"acme": {"requests": QuotaUse(40.0, 30.0)}})
    (claim,) = leased.ask(0.0, 4, [None, report])
    assert claim.rate == pytest.approx(100.0 - 25.0 - 30.0)

"""Several gateways grant together what one would: measured over seconds of virtual time, with reports that are late."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gateway.core.admission.shared_quotas import MOST_TOLD, SharedQuotas
from gateway.core.admission.tenants import TenantQuotas, TenantSpec
from gateway.core.peers.peers import PeerReport, Peers

TURN_S = 0.2
LATE_S = 0.05  # of a report
Served = list[tuple[float, int]]  # (when, by which)


class Gateways:
    """Gateways with one tenant, whose callers come at random."""

    def __init__(self, count: int, spec: TenantSpec, seed: int = 1) -> None:
        self.tenants = [TenantQuotas({"acme": spec}) for _ in range(count)]
        self.shared = [SharedQuotas(one) for one in self.tenants]
        self.peers = [Peers(f"g{number}") for number in range(count)]
        self.draw = random.Random(seed)
        self.dead: set[int] = set()
        self.cut_off = False
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def run(self, seconds: float, rates: list[float], ask: Callable[[int, float], bool]) -> Served:
        served: Served = []
        until, turn_at = self.now + seconds, self.now
        next_at = [self.now + self.draw.expovariate(rate) if rate else until for rate in rates]
        while self.now < until:
            place = min(range(len(rates)), key=next_at.__getitem__)
            self.now = min(next_at[place], turn_at, until)
            for one in [one for one in self._due if one[0] <= self.now]:
                self._due.remove(one)
                one[1]()
            if self.now >= turn_at:
                self._turn()
                turn_at += TURN_S
            elif self.now == next_at[place] and self.now < until:
                next_at[place] += self.draw.expovariate(rates[place])
                if place not in self.dead and ask(place, self.now):
                    served.append((self.now, place))
        return served

    def _turn(self) -> None:
        now = self.now
        for number, shared in enumerate(self.shared):
            if number in self.dead:
                continue
            report = PeerReport({name: dict(kinds) for name, kinds in shared.take(now).items()})
            peers = self.peers[number]
            shared.divide(peers.reports(now), peers.unknown(now), now)
            if not self.cut_off:
                self._due += [
                    (now + LATE_S, lambda to=to, of=number, what=report: to.report(f"g{of}", 1, what, self.now))  # type: ignore[misc]
                    for place, to in enumerate(self.peers)
                    if place != number
                ]

    def ends(self, number: int) -> None:
        self.dead.add(number)
        for place, peers in enumerate(self.peers):
            if place != number:
                peers.state(f"g{number}", 1, self.now, online=False)

    def loses_the_broker(self) -> None:
        self.cut_off = True
        for peers in self.peers:
            peers.connected(up=False, now=self.now)

    def asks(self, number: int, now: float) -> bool:
        return self.tenants[number].of("acme").ask(now) <= 0.0

    def generates(self, number: int, now: float) -> bool:
        quota = self.tenants[number].of("acme")
        if quota.reserve(100, now) > 0.0:
            return False
        quota.settle(40, now)
        return True


def rate(served: Served, since: float, until: float) -> float:
    return sum(since <= at < until for at, _ in served) / (until - since)


@pytest.mark.parametrize("seed", range(3))
def test_a_quota_over_four_gateways_skewed_ten_to_one_is_kept_within_a_twentieth(seed: int) -> None:
    gateways = Gateways(4, TenantSpec(requests_per_s=100.0), seed)
    served = gateways.run(30.0, [200.0, 20.0, 20.0, 20.0], gateways.asks)
    for since in (3.0, 10.0, 20.0):
        assert rate(served, since, since + 10.0) == pytest.approx(100.0, rel=0.05)
    of_small = sum(place > 0 for at, place in served if at > 5.0) / 25.0
    assert of_small == pytest.approx(60.0, rel=0.1), "those of which little is asked are served in full"


def test_the_equal_part_of_each_would_have_kept_four_tenths_of_it() -> None:
    """What dividing by the number alone would grant: the test above must not pass by chance."""
    gateways = Gateways(4, TenantSpec(requests_per_s=100.0))
    gateways.cut_off = True
    for peers in gateways.peers:
        for number in range(4):
            peers.state(f"g{number}", 1, 0.0, online=True)
        peers.connected(up=False, now=0.0)
    served = gateways.run(20.0, [400.0, 1.0, 1.0, 1.0], gateways.asks)
    assert rate(served, 5.0, 20.0) == pytest.approx(28.0, rel=0.1)


def test_a_jump_of_what_is_asked_is_followed_within_seconds_and_nothing_is_granted_twice() -> None:
    gateways = Gateways(4, TenantSpec(requests_per_s=100.0))
    gateways.run(10.0, [300.0, 5.0, 5.0, 5.0], gateways.asks)
    served = gateways.run(10.0, [5.0, 5.0, 5.0, 300.0], gateways.asks)
    assert rate(served, 10.0, 12.0) <= 120.0
    assert rate(served, 12.0, 20.0) == pytest.approx(100.0, rel=0.05)


@pytest.mark.slow
def test_without_the_broker_no_more_than_the_whole_is_granted() -> None:
    gateways = Gateways(4, TenantSpec(requests_per_s=100.0))
    gateways.run(5.0, [200.0] * 4, gateways.asks)
    gateways.loses_the_broker()
    served = gateways.run(30.0, [400.0, 20.0, 20.0, 20.0], gateways.asks)
    for since in (5.0, 10.0, 25.0):
        assert rate(served, since, since + 10.0) <= 105.0


def test_what_a_gateway_had_that_ended_is_the_others_within_a_second() -> None:
    gateways = Gateways(2, TenantSpec(requests_per_s=100.0))
    gateways.run(5.0, [200.0, 200.0], gateways.asks)
    gateways.ends(1)
    served = gateways.run(10.0, [200.0, 200.0], gateways.asks)
    assert rate(served, 6.0, 15.0) == pytest.approx(100.0, rel=0.05)


def test_tokens_are_divided_by_what_is_asked_too() -> None:
    gateways = Gateways(4, TenantSpec(tokens_per_s=600.0))
    gateways.run(90.0, [40.0, 2.0, 2.0, 2.0], gateways.generates)  # the burst is a minute's worth
    served = gateways.run(20.0, [40.0, 2.0, 2.0, 2.0], gateways.generates)
    assert 60.0 * rate(served, 90.0, 110.0) == pytest.approx(600.0, rel=0.05)


def test_places_add_up_to_what_there_is() -> None:
    gateways = Gateways(3, TenantSpec(max_in_flight=10))

    def hold(number: int, now: float) -> bool:
        quota = gateways.tenants[number].of("acme")
        if not quota.has_place():
            return False
        quota.enter()
        return True

    gateways.run(1.0, [1.0, 0.0, 0.0], lambda number, now: False)  # they get to know each other
    gateways.run(5.0, [30.0, 3.0, 3.0], hold)
    held = [one.of("acme").in_flight for one in gateways.tenants]
    assert 8 <= sum(held) <= 10 + 2, "more by no more than what others took since the last report"
    assert held[0] > max(held[1:])


def test_a_gateway_alone_has_the_whole_again() -> None:
    gateways = Gateways(2, TenantSpec(requests_per_s=10.0, max_in_flight=8))
    gateways.run(3.0, [50.0, 50.0], gateways.asks)
    quota = gateways.tenants[0].of("acme")
    assert quota.requests.rate == pytest.approx(5.0, rel=0.2) and quota.places is not None and quota.places < 8
    gateways.ends(1)
    gateways.run(1.0, [50.0, 0.0], gateways.asks)
    assert (quota.requests.rate, quota.requests.burst, quota.places) == (pytest.approx(10.0), pytest.approx(10.0), 8)


def test_of_very_many_quotas_those_of_which_most_is_asked_are_told() -> None:
    specs = {f"t{number:05d}": TenantSpec(requests_per_s=100.0) for number in range(MOST_TOLD + 500)}
    tenants = TenantQuotas(specs)
    shared = SharedQuotas(tenants)
    shared.take(0.0)
    for number, name in enumerate(specs):
        for _ in range(10 if number < 10 else 1):
            tenants.of(name).ask(0.5)
    told = shared.take(1.0)
    assert len(told) == MOST_TOLD
    assert {f"t{number:05d}" for number in range(10)} <= set(told)

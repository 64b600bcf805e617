"""How many replicas are needed: by load, by how much it varies, by where it goes, and by what was late."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.fleet.scaling import DRAIN_S, KNOWN_S, ReplicaNeed, ReplicaScaler, ScalingSpec
from gateway.core.peers.demand_terms import DemandTerms, pooled
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.attempt import AttemptTelemetry
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, spec, variant
from tidegate.outcome import Overloaded

ROW_S, CALL_S, SLACK_S = 0.020, 0.010, 0.5


class Traffic:
    """Requests at a rate that may change, and a need that is looked at every five seconds."""

    def __init__(self, seed: int = 1, **asked: float) -> None:
        self.scaling = ReplicaScaler(ScalingSpec(**asked))  # type: ignore[arg-type]
        self.now = NOW
        self.replicas = 1
        self._draw = Random(seed)
        self._looked_at = NOW

    def flow(self, seconds: float, rate: Callable[[float], float], *, backlog_s: float = 0.0) -> ReplicaNeed:
        """Independent arrivals; each need is followed at once."""
        until, began = self.now + seconds, self.now
        while self.now < until:
            self.now += self._draw.expovariate(max(1e-3, rate(self.now - began)))
            self.scaling.arrived(ROW_S + CALL_S, CALL_S, SLACK_S, self.now)
            self.look(backlog_s)
        return self.scaling.needed

    def look(self, backlog_s: float = 0.0) -> None:
        if self.now - self._looked_at >= 5.0:
            self._looked_at = self.now
            self.replicas = self.scaling.decide(self.now, replicas=self.replicas, backlog_s=backlog_s).replicas


@pytest.mark.slow
def test_the_need_is_the_load_and_a_square_root_of_it_and_not_a_share_of_it() -> None:
    small = Traffic().flow(300.0, lambda _: 50.0)
    large = Traffic().flow(300.0, lambda _: 800.0)
    work_s = ROW_S + CALL_S / 8.0
    assert small.load == pytest.approx(50.0 * work_s, rel=0.15)
    assert large.load == pytest.approx(800.0 * work_s, rel=0.05)
    assert large.spread / small.spread == pytest.approx(sqrt(16.0), rel=0.3)
    spare_small, spare_large = (one.replicas / one.load for one in (small, large))
    assert spare_large < 0.75 * spare_small


@pytest.mark.slow
def test_the_demands_of_several_gateways_add_up_to_that_of_one_which_sees_all_requests() -> None:
    parts = [Traffic(seed).flow(150.0, lambda _: 60.0, backlog_s=3.0).terms for seed in range(4)]
    whole = Traffic(9).flow(150.0, lambda _: 240.0, backlog_s=3.0)
    total = pooled(parts)
    assert total.replicas == pytest.approx(whole.terms.replicas, rel=0.1)
    assert sum(ceil(one.replicas) for one in parts) > whole.replicas  # which rounds and has its margin four times


def test_quiet_gateways_ask_for_the_least_once_and_all_tell_the_same_number() -> None:
    quiet = DemandTerms(0.3, 0.01, 0.0)
    told = [decided([quiet] * 3), decided([quiet] * 3, own=0.0)]
    assert told[0] == 1, "a gateway alone would have said 1 for each of the four"
    assert told[1] == 1
    busy = DemandTerms(2.2, 0.04, 0.5)
    assert decided([busy, DemandTerms(0.6, 0.0, 0.5)]) == ceil(2.8 + 0.2 + 0.5 - 0.1)


def test_while_another_gateway_does_not_know_its_need_no_replica_is_given_up() -> None:
    assert decided([None], replicas=5) == 5
    assert decided([DemandTerms(0.1, 0.0, 0.0)], replicas=5) == 1


def decided(others: list[DemandTerms | None], *, replicas: int = 1, own: float = 0.0) -> int:
    """What a gateway says of which nothing has been asked for as long as it takes to know that."""
    scaler = ReplicaScaler(ScalingSpec(scale_down_s=0.0))
    for second in range(KNOWN_S + 2):
        scaler.arrived(own, 0.0, 1.0, float(second))
    return scaler.decide(KNOWN_S + 2.0, replicas=replicas, backlog_s=0.0, others=others).replicas


@pytest.mark.slow
def test_bursts_need_more_than_the_same_load_without_them() -> None:
    smooth = Traffic().flow(400.0, lambda _: 200.0)
    bursty = Traffic().flow(400.0, lambda at: 500.0 if at % 50.0 < 10.0 else 125.0)
    assert bursty.replicas >= smooth.replicas + 2


@pytest.mark.slow
def test_rising_load_is_met_where_it_will_be_when_a_replica_has_started() -> None:
    early, late = (Traffic(start_s=start_s) for start_s in (90.0, 0.0))
    for one in (early, late):
        one.flow(60.0, lambda _: 100.0)
        one.flow(100.0, lambda at: 100.0 + 4.0 * at)
    assert early.scaling.needed.replicas > late.scaling.needed.replicas
    assert early.scaling.needed.forecast > 1.3 * early.scaling.needed.load


@pytest.mark.slow
def test_a_lull_is_waited_out_and_then_given_back() -> None:
    traffic = Traffic(scale_down_s=120.0)
    before = traffic.flow(200.0, lambda _: 400.0).replicas
    assert traffic.flow(100.0, lambda _: 20.0).replicas == before
    assert traffic.flow(300.0, lambda _: 20.0).replicas < before / 2


@pytest.mark.slow
def test_silence_needs_the_least() -> None:
    traffic = Traffic(scale_down_s=10.0, min_replicas=2)
    traffic.flow(120.0, lambda _: 400.0)
    traffic.now += 4000.0
    traffic.look()
    traffic.now += 20.0
    traffic.look()
    assert traffic.scaling.needed.replicas == 2


@pytest.mark.slow
def test_a_backlog_is_worked_off_with_more() -> None:
    without = Traffic().flow(120.0, lambda _: 100.0)
    backed_up = Traffic().flow(120.0, lambda _: 100.0, backlog_s=30.0)
    assert backed_up.replicas >= without.replicas + 2


def test_a_gateway_that_has_just_started_takes_nobody_down() -> None:
    traffic = Traffic()
    traffic.replicas = 7
    traffic.flow(KNOWN_S - 10.0, lambda _: 5.0)
    assert not traffic.scaling.known
    assert traffic.scaling.needed.replicas == 7
    traffic.flow(400.0, lambda _: 5.0)
    assert traffic.scaling.known
    assert traffic.scaling.needed.replicas == 1


@pytest.mark.slow
def test_what_is_late_although_all_are_there_teaches_that_more_are_needed() -> None:
    taught, untaught = Traffic(), Traffic()
    for traffic in (taught, untaught):
        traffic.flow(120.0, lambda _: 100.0)
    before = taught.scaling.strain
    for _ in range(10):
        for number in range(100):
            taught.scaling.ended(in_time=number % 10 != 0)
            untaught.scaling.ended(in_time=True)
        taught.flow(20.0, lambda _: 100.0)
        untaught.flow(20.0, lambda _: 100.0)
    assert taught.scaling.strain > before > untaught.scaling.strain
    assert taught.scaling.needed.replicas > untaught.scaling.needed.replicas


def test_what_is_late_while_replicas_are_still_starting_teaches_nothing() -> None:
    traffic = Traffic()
    traffic.flow(120.0, lambda _: 400.0)
    strain = traffic.scaling.strain
    for _ in range(10):
        traffic.now += 5.0
        for _ in range(100):
            traffic.scaling.ended(in_time=False)
        traffic.scaling.decide(traffic.now, replicas=1, backlog_s=0.0)
    assert traffic.scaling.strain == strain


def test_those_turned_away_count_as_load() -> None:
    plain, crowded = Traffic(), Traffic()
    for traffic in (plain, crowded):
        for _ in range(30):
            traffic.flow(5.0, lambda _: 100.0)
            if traffic is crowded:
                traffic.scaling.turned_away(1000, traffic.now)
    assert crowded.scaling.needed.load > 2.0 * plain.scaling.needed.load
    assert "ReplicaScaler" in repr(plain.scaling)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 400.0), st.floats(1e-4, 10.0), st.floats(-1.0, 30.0), st.integers(0, 9), st.booleans()
        ),
        max_size=120,
    )
)
def test_the_need_stays_within_its_bounds_and_never_falls_faster_than_it_may(
    told: list[tuple[float, float, float, int, bool]],
) -> None:
    scaling, now = ReplicaScaler(ScalingSpec(min_replicas=2, max_replicas=9, scale_down_s=60.0)), NOW
    wishes: list[tuple[float, int]] = []  # the backlog alone asks for so many
    for gap_s, work_s, slack_s, replicas, in_time in told:
        now += gap_s
        scaling.arrived(work_s, 0.5 * work_s, slack_s, now)
        scaling.ended(in_time=in_time)
        needed = scaling.decide(now, replicas=replicas, backlog_s=abs(slack_s)).replicas
        assert 2 <= needed <= 9
        assert all(needed >= wished for at, wished in wishes if at >= now - 60.0)
        wishes.append((now, min(9, max(2, ceil(abs(slack_s) / DRAIN_S - 0.1)))))


# in the fleet


def pools() -> Fleet:
    fleet = fleet_of()
    fleet.scaling = ReplicaScaler(ScalingSpec())
    for target_id in ("pool/a", "edge/b"):
        fleet.add(spec(target_id), NOW)
        fleet.fold(LinkUp(target_id, target_id, 1, (offer(variant()),)), NOW)
    return fleet


def test_attempts_at_the_pool_tell_what_they_cost_and_those_at_edges_do_not() -> None:
    fleet = pools()
    assert fleet.scaling is not None
    placer, at = UtilityPlacer(fleet), NOW
    for target, other in (("edge/b", "pool/a"), ("pool/a", "edge/b")):
        for key in range(100):
            at += 0.1
            chosen = placer.decide(ask(at=at), at, [other]).chosen
            assert chosen is not None
            assert chosen.target.id == target
            AttemptTelemetry(chosen, key, 16.0, at).answered({"queue": 0.0, "compute": 0.01}, None, at + 0.012)
        needed = fleet.replicas_needed(at + 1.0)
        assert needed is not None
        assert (needed.load > 0.0) is (target == "pool/a")


def test_a_refusal_of_the_pool_counts_as_late() -> None:
    fleet = pools()
    assert fleet.scaling is not None
    chosen = UtilityPlacer(fleet).decide(ask(), NOW, ["edge/b"]).chosen
    assert chosen is not None
    before = fleet.scaling.strain
    at = NOW
    for key in range(200):
        at += 0.5
        AttemptTelemetry(chosen, key, 16.0, at).failed(Overloaded("full"), at + 0.001, 0.5)
        fleet.replicas_needed(at)
    assert fleet.scaling.strain > before


def test_nobody_who_did_not_ask_is_told() -> None:
    assert fleet_of(pool_a=variant()).replicas_needed(NOW) is None

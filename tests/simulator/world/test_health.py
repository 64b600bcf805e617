"""Faults of single devices in a fleet of eight and a pool: what they may cost.

The rows are those of docs/design/faults.md, "Fault matrix".
"""

from __future__ import annotations

from collections import Counter

import pytest

from gateway.core.health.breaker import BreakerState
from simulator.scenarios.scenario_file import LoadedScenario
from simulator.simulation import World
from tests.simulator.worlds import edited
from tidegate.outcome import Overloaded, ServeError

pytestmark = pytest.mark.slow

FAULT_AT_S, SETTLED_S = 4.0, 1.0


def eight(faults: str = "", *, rate: float = 200.0, seconds: float = 10.0) -> LoadedScenario:
    return edited(
        ("duration_s: 6", f"duration_s: {seconds}"),
        ("count: 2, slow: [1.0, 2.0]", "count: 8, slow: [1.0, 2.0]"),
        ("rate: 60", f"rate: {rate}"),
        extra=f"faults: [{faults}]",
    )


class Watched:
    """A run that notes each attempt: when it was launched, where, and how it ended."""

    def __init__(self, loaded: LoadedScenario, policy: str = "value", seed: int = 1) -> None:
        self.world = World(loaded, policy, seed)
        self.launched: list[tuple[float, str]] = []
        self.refused: list[tuple[float, str, ServeError]] = []
        gateway = self.world.gateways[0]
        router = gateway.router
        launched = router.launched

        def note(target_id: str, now: float) -> None:
            self.launched.append((now - SETTLED_S, target_id))
            launched(target_id, now)

        router.launched = note  # type: ignore[method-assign]
        for worker in self.world.workers.values():
            trouble = worker.trouble

            def told(now: float, id: str = worker.id, trouble=trouble) -> ServeError | None:  # type: ignore[no-untyped-def]
                error: ServeError | None = trouble(now)
                if error is not None:
                    self.refused.append((now - SETTLED_S, id, error))
                return error

            worker.trouble = told
        self.run = self.world.run()

    def share(self, target_id: str, since_s: float, until_s: float) -> float:
        """Of the launches in this time, those that went there."""
        where = Counter(id for at, id in self.launched if since_s <= at < until_s)
        return where[target_id] / max(1, where.total())

    def attainment(self, since_s: float = 0.0, until_s: float = 1e9) -> float:
        bins = [sums for bin_, sums in self.run.tally.timeline.items() if since_s <= bin_ / 4 - SETTLED_S < until_s]
        return sum(in_time for _, in_time in bins) / sum(arrivals for arrivals, _ in bins)


@pytest.fixture(scope="module")
def calm() -> Watched:
    return Watched(eight())


FASTEST = "edge/device-1"


def test_row_7_a_crashed_edge_costs_a_point_at_most_and_is_left_at_once(calm: Watched) -> None:
    hurt = Watched(eight(f"{{kind: crash, target: {FASTEST}, at_s: {FAULT_AT_S}, for_s: 3}}"))
    assert hurt.share(FASTEST, 1.0, FAULT_AT_S) > 0.02, "it had its share before"
    assert hurt.attainment() >= calm.attainment() - 0.01
    gone_at = FAULT_AT_S + 0.1  # a way back, on a link of a millisecond or so
    assert hurt.share(FASTEST, gone_at, FAULT_AT_S + 3.0) == 0.0
    assert hurt.share(FASTEST, FAULT_AT_S + 5.0, 10.0) > 0.02, "and it is used again afterwards"


def test_row_7_half_of_the_edges_crash(calm: Watched) -> None:
    crashes = ", ".join(f"{{kind: crash, target: edge/device-{n}, at_s: {FAULT_AT_S}, for_s: 3}}" for n in range(1, 5))
    hurt = Watched(eight(crashes))
    assert hurt.attainment() >= calm.attainment() - 0.06


def test_row_8_an_edge_that_stands_still_draws_no_traffic(calm: Watched) -> None:
    hurt = Watched(eight(f"{{kind: stop, target: {FASTEST}, at_s: {FAULT_AT_S}, for_s: 5}}"))
    after = [at for at, id in hurt.launched if id == FASTEST and FAULT_AT_S + 0.3 <= at < FAULT_AT_S + 5.0]
    assert len(after) <= 3, "probes"
    assert hurt.share(FASTEST, FAULT_AT_S + 1.0, FAULT_AT_S + 5.0) < 0.01
    assert hurt.attainment() >= calm.attainment() - 0.02


def test_row_9_an_edge_three_times_slower_is_learned_and_costs_two_points_at_most(calm: Watched) -> None:
    hurt = Watched(eight(f"{{kind: slow, target: {FASTEST}, at_s: {FAULT_AT_S}, for_s: 6, times: 3}}"))
    assert hurt.attainment() >= calm.attainment() - 0.02
    before, after = hurt.share(FASTEST, 1.0, FAULT_AT_S), hurt.share(FASTEST, FAULT_AT_S + 3.0, 10.0)
    assert after < 0.8 * before


@pytest.mark.parametrize("policy", ["value", "cheapest"])
def test_row_10_an_edge_that_fails_fast_gets_ten_requests_and_then_probes(policy: str) -> None:
    calm = Watched(eight(), policy)
    hurt = Watched(eight(f"{{kind: fail_fast, target: {FASTEST}, at_s: {FAULT_AT_S}, for_s: 6}}"), policy)
    met = [at for at, id, _ in hurt.refused if id == FASTEST]
    first_second = [at for at in met if at < FAULT_AT_S + 1.0]
    assert 5 <= len(first_second) <= 10
    later = [at for at in met if at >= FAULT_AT_S + 1.0]
    sent_later = [at for at, _ in hurt.launched if at >= FAULT_AT_S + 1.0]
    assert len(later) < 0.01 * len(sent_later)
    lost = hurt.run.tally.all.arrivals - hurt.run.tally.all.in_time
    assert lost <= calm.run.tally.all.arrivals - calm.run.tally.all.in_time + 10


def test_row_10_failing_fast_never_makes_it_look_fast() -> None:
    hurt = Watched(eight(f"{{kind: fail_fast, target: {FASTEST}, at_s: {FAULT_AT_S}, for_s: 6}}"))
    offered = next(one for one in hurt.world.gateways[0].fleet.offered("m", "1") if one.target.id == FASTEST)
    assert offered.cost.predict_s(20.0) > 0.9 * offered.cost.points[0][1]
    assert offered.target.breaker.state is not BreakerState.CLOSED


def test_row_11_a_storm_of_refusals_moves_the_load_and_opens_nothing(calm: Watched) -> None:
    hurt = Watched(eight(f"{{kind: refuse, target: {FASTEST}, at_s: {FAULT_AT_S}, for_s: 1}}"))
    target = hurt.world.gateways[0].fleet.targets[FASTEST]
    assert all(isinstance(error, Overloaded) for _, _, error in hurt.refused)
    assert target.breaker.state is BreakerState.CLOSED and target.breaker.retry_at == 0.0, "it never opened"
    assert target.path_breaker.retry_at == 0.0
    assert hurt.attainment() >= calm.attainment() - 0.01
    assert hurt.share(FASTEST, FAULT_AT_S + 1.2, 10.0) > 0.02, "it is back at once"


def test_a_pool_that_fails_is_left_to_what_only_it_can_do() -> None:
    hurt = Watched(eight(f"{{kind: fail_fast, target: pool/gpu, at_s: {FAULT_AT_S}, for_s: 3}}", rate=100.0))
    met = [at for at, id, _ in hurt.refused if id == "pool/gpu"]
    assert len(met) <= 10 + 6, "five in a row, and probes after 0.5, 1.5 and 3.5 s"
    assert hurt.run.tally.by_class["short"].attainment > 0.98

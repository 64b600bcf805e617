"""The fleet on virtual time: every request is answered once, worlds repeat, faults act and heal."""

from __future__ import annotations

import gc

import pytest

from simulator.baselines.policies import POLICIES
from simulator.scenarios.scenario_file import LoadedScenario
from simulator.simulation import Run, World, simulate
from tests.simulator.worlds import edited

FAULTY = """
faults:
  - {kind: partition, target: pool/gpu, at_s: 1, for_s: 1.5}
  - {kind: partition, target: edge/device-1, at_s: 3, for_s: 9, direction: from}
  - {kind: crash, target: edge/device-2, at_s: 1.5, for_s: 1}
  - {kind: crash, target: pool/gpu, at_s: 4.5, for_s: 0.5}
  - {kind: stop, target: edge/device-2, at_s: 4, for_s: 1}
  - {kind: slow, target: pool/gpu, at_s: 3, for_s: 1, times: 4}
  - {kind: broker, target: mqtt, at_s: 2, for_s: 2}
"""


def everything_wrong() -> LoadedScenario:
    return edited(
        ("warmup_s: 1", "warmup_s: 1\ngateways: 3\ngateways_per_edge: 2"),
        (
            "link: lan}",
            "link: lan, thermal: {every_s: 2, for_s: 1, slow: [1.5, 2.5]}, background: {share: 0.2, class: short}}",
        ),
        (
            "{delay_ms: 10,",
            "{delay_ms: 10, loss: 0.02, outages: {every_s: 3, for_s: 0.5}, to_mbit: 5, from_mbit: 5,"
            " queue_kbyte: 20, overflow: drop, bad: {every_s: 2, for_s: 0.5, delay_times: 6, loss: 0.1},",
        ),
        ("rate: 60", "rate: 250, process: bursty, burst_every_s: 2, burst_for_s: 0.5"),
        extra=FAULTY,
    )


def attainment(run: Run) -> float:
    return run.tally.all.attainment


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_in_exactly_one_outcome_whatever_goes_wrong(policy: str) -> None:
    world = World(everything_wrong(), policy, seed=5)

    run = world.run()  # checks that arrivals are the sum of the outcomes

    assert run.tally.all.arrivals > 500
    assert sum(group.arrivals for group in run.tally.by_class.values()) == run.tally.all.arrivals
    for gateway in world.gateways:
        assert gateway.router.door.in_flight == 0
        assert all(target.queue_estimate.in_flight == 0 for target in gateway.fleet.targets.values())
        assert all(stream.pending == 0 for stream in gateway.streams.values())
    assert all(worker.queued == worker.in_flight == 0 for worker in world.workers.values())


@pytest.mark.slow
def test_a_run_repeats_exactly_and_another_seed_does_not() -> None:
    def outcome(seed: int) -> tuple[object, ...]:
        run = simulate(everything_wrong(), "tidegate", seed)
        return run.tally.all.in_time, dict(run.tally.all.outcomes), run.events, run.compute_s

    first = outcome(1)
    assert outcome(1) == first
    assert outcome(2) != first


@pytest.mark.slow
def test_a_fleet_with_time_to_spare_answers_everything_in_time() -> None:
    run = simulate(edited(("rate: 60", "rate: 10")), "tidegate", 1)
    assert attainment(run) == 1.0
    assert run.tally.quality / run.tally.all.in_time >= 0.98


@pytest.mark.slow
def test_an_overloaded_fleet_refuses_and_keeps_its_goodput() -> None:
    calm = simulate(edited(("rate: 60", "rate: 60")), "all-cloud", 1)
    flooded = simulate(edited(("rate: 60", "rate: 4000"), ("duration_s: 6", "duration_s: 3")), "all-cloud", 1)
    assert attainment(flooded) < 0.9 < attainment(calm)
    assert flooded.tally.all.in_time / flooded.counted_s > calm.tally.all.in_time / calm.counted_s


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tidegate", "static"])
def test_a_gateway_lets_in_as_many_as_its_scenario_says(policy: str) -> None:
    crowded = simulate(edited(extra="max_in_flight: 1\n"), policy, 1)
    assert crowded.tally.all.outcomes["overloaded"] > 50
    assert simulate(edited(), policy, 1).tally.all.outcomes["overloaded"] == 0


@pytest.mark.slow
def test_the_tiers_that_baselines_promise_are_the_ones_that_answer() -> None:
    edge = simulate(edited(("rate: 60", "rate: 20")), "all-edge", 1)
    cloud = simulate(edited(("rate: 60", "rate: 20")), "all-cloud", 1)
    long_ones = edge.tally.by_class["long"].in_time  # edges take rows of at most 100
    assert sum(count for name, count in edge.tally.served_by.items() if name.startswith("pool/")) >= long_ones
    assert set(cloud.tally.served_by) == {"pool/gpu"}


@pytest.mark.slow
def test_joint_inference_sends_what_is_hard_on_to_the_pool() -> None:
    # given only short requests, of which half are hard
    loaded = edited(
        ("rate: 60", "rate: 20"), ("priority: 1}", "priority: 1, hard_share: 0.5}"), ("share: 1,", "share: 0,")
    )
    run = simulate(loaded, "sedna", 1)
    from_pool = run.tally.served_by["pool/gpu"] / run.tally.served_by.total()
    assert from_pool == pytest.approx(0.5, abs=0.15)
    assert run.tally.attempts > run.tally.served_by.total()


HALF_ARE_HARD = (
    ("edge_quality: 0.98", "edge_quality: 0.99\n    confidence: {hard_quality: 0.5, max_share: 1.0}"),
    ("rate: 60", "rate: 20"),
    ("priority: 1}", "priority: 1, hard_share: 0.5}"),
    ("share: 1,", "share: 0,"),
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cheapest", "value"])
def test_what_an_edge_is_unsure_of_is_escalated_by_the_live_machine(policy: str) -> None:
    # given only short requests, of which half are hard, and edges that know it
    run = simulate(edited(*HALF_ARE_HARD), policy, 1)
    answers = run.tally.served_by.total()
    assert attainment(run) > 0.99
    assert run.tally.served_by["pool/gpu"] / answers > 0.4
    assert run.tally.attempts > 1.1 * answers
    assert run.tally.quality / answers > 0.97


@pytest.mark.slow
def test_hard_answers_of_an_edge_are_worth_less_where_no_policy_escalates_them() -> None:
    everything = simulate(edited(*HALF_ARE_HARD), "all-edge", 1)
    assert everything.tally.attempts == everything.tally.served_by.total()
    assert everything.tally.quality / everything.tally.all.in_time == pytest.approx(0.99 * 0.75, abs=0.08)


@pytest.mark.slow
def test_a_dead_pool_leaves_provisional_answers_and_no_errors() -> None:
    fault = "faults: [{kind: partition, target: pool/gpu, at_s: 1, for_s: 9}]"
    run = simulate(edited(*HALF_ARE_HARD, extra=fault), "value", 1)
    assert attainment(run) > 0.99
    assert run.tally.quality / run.tally.all.in_time < 0.9


@pytest.mark.slow
def test_a_partition_of_the_pool_costs_what_only_the_pool_can_do_and_heals() -> None:
    fault = "faults: [{kind: partition, target: pool/gpu, at_s: 2, for_s: 1}]"
    # given only requests that no edge takes
    hurt = simulate(edited(("rate: 60", "rate: 10"), ("share: 3,", "share: 0,"), extra=fault), "all-cloud", 1)
    during = [sums for bin_, sums in hurt.tally.timeline.items() if 3.0 <= bin_ / 4 < 3.5]
    after = [sums for bin_, sums in hurt.tally.timeline.items() if bin_ / 4 >= 5.5]
    assert sum(in_time for _, in_time in during) == 0
    assert sum(in_time for _, in_time in after) == sum(arrivals for arrivals, _ in after) > 0


@pytest.mark.slow
def test_a_process_that_stands_still_answers_afterwards() -> None:
    fault = "faults: [{kind: stop, target: pool/gpu, at_s: 2, for_s: 0.3}]"
    run = simulate(edited(("rate: 60", "rate: 20"), ("budget_ms: 200", "budget_ms: 900"), extra=fault), "all-cloud", 1)
    assert attainment(run) > 0.98
    assert run.tally.all.latencies.quantile_s(1.0) > 0.25


@pytest.mark.slow
def test_compute_behind_no_answer_is_counted_as_waste() -> None:
    from simulator.report.figures import figures

    run = simulate(edited(("budget_ms: 200", "budget_ms: 24"), ("rate: 60", "rate: 90")), "all-cloud", 1)
    found = figures([run], load=1.0, rate=90.0)
    assert 0.0 < found.waste[0] < 1.0


def test_devices_that_were_measured_offer_their_own_tables() -> None:
    world = World(edited(("count: 2,", "count: 2, edge_ms: {m: [[1, 6], [100, 70]]},")), "tidegate", 1)
    (offer,) = world.workers["edge/device-2"].offers
    assert offer.variants[0].cost == ((1.0, 0.012), (100.0, 0.14))  # times its `slow` of 2


def test_an_unknown_policy_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        simulate(edited(), "wishful", 1)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_leaves_the_garbage_collector_as_it_was(frozen: bool) -> None:
    (gc.freeze if frozen else gc.unfreeze)()
    try:
        before = gc.get_threshold()
        simulate(edited(("duration_s: 6", "duration_s: 2")), "all-edge", 1)
        assert gc.get_threshold() == before
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.freeze()  # as tests/conftest.py has it

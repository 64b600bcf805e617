"""What one placement costs on one core, in place: the live `Placer` over a fleet in use, by the number of targets.

Every target has offers with its own cost table, a link with samples, a report and requests of ours in flight, so no
branch is taken that an idle fleet would take. Decisions and answers alternate, as they do in service: after each
decision one attempt is launched and an older one answered, and only `decide` is timed. Time is the thread's own CPU
time, garbage collection included: on a shared machine the wall clock's 99th percentile is the scheduler's time slice.

    python -m tests.bench.decision_cost [--quick] [--repeats 5] [--policy NAME]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import thread_time_ns

import numpy as np

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkLoad, LinkRtt, LinkUp
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Placer
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.attempt import AttemptTelemetry
from tests.bench.harness import Goal, Report, Spread, parser, table
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.types import LoadReport

SIZES = (8, 32, 1_000, 10_000)
POLICIES: dict[str, Callable[[Fleet], Placer]] = {"tidegate": Placer, "cheapest": Placer, "value": UtilityPlacer}
MEDIAN_GOAL_US, P99_GOAL_US = 100.0, 300.0
IN_FLIGHT_A_TARGET = 2
DECISIONS = {8: 4_000, 32: 4_000, 1_000: 200, 10_000: 30}


@dataclass(frozen=True)
class Cost:
    """Microseconds a decision."""

    p50: float
    p99: float


def fleet_in_use(targets: int, draw: Random, now: float) -> Fleet:
    """One pool for thirty-one edges, all up, measured and heard."""
    fleet = Fleet(lambda _model, _version: "tokens")
    for number in range(targets):
        tier = "pool" if number % 32 == 31 else "edge"
        id = f"{tier}/{number}"
        fleet.add(TargetSpec(id, tier, "simulated"), now)  # type: ignore[arg-type]
    for id in fleet.targets:
        slow = 0.5 + 2.0 * draw.random()
        cost = tuple((units, slow * (0.004 + 0.0003 * units)) for units in (8.0, 32.0, 128.0, 512.0))
        variant = VariantOffer("int8", "int8", cost, 32, 512, 0.98)
        fleet.fold(LinkUp(id, id, 1, (ModelOffer("m", "1", (variant,)),)), now)
        for _ in range(8):
            fleet.fold(LinkRtt(id, 0.004 + 0.004 * draw.random()), now)
        fleet.fold(LinkLoad(id, LoadReport(1, 1, 2, 1, 0.02 * draw.random())), now)
    return fleet


def measure(targets: int, build: Callable[[Fleet], Placer], decisions: int, seed: int) -> Cost:
    draw, now = Random(seed), 100.0
    fleet = fleet_in_use(targets, draw, now)
    placer = build(fleet)
    under_way: deque[AttemptTelemetry] = deque()
    key = 0
    for target_offered in fleet.offered("m", "1"):
        for _ in range(IN_FLIGHT_A_TARGET):
            target_offered.target.queue_estimate.launch(-1 - key, 0.01, now)
            key += 1
    took_us = np.empty(decisions)
    for number in range(decisions):
        now += 0.002
        units = float(8 + int(draw.random() * 200))
        ask = Ask("m", "1", units, 1, int(units), now + 0.05 + 0.3 * draw.random(), priority=number % 4)
        began = thread_time_ns()
        decision = placer.decide(ask, now)
        took_us[number] = (thread_time_ns() - began) / 1e3
        if decision.chosen is not None:
            under_way.append(AttemptTelemetry(decision.chosen, number, units, now))
        if len(under_way) > 16:
            done = under_way.popleft()
            stages = {"queue": 0.0, "compute": done.candidate.compute_s * (0.8 + 0.4 * draw.random())}
            done.answered(stages, LoadReport(1, 2 + number, 1, 1, 0.005), now)
    warm = took_us[decisions // 10 :]
    return Cost(float(np.percentile(warm, 50)), float(np.percentile(warm, 99)))


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--policy", default="tidegate", choices=POLICIES)
    arguments = options.parse_args()
    repeats = arguments.repeats or (2 if arguments.quick else 5)
    sizes = SIZES[:3] if arguments.quick else SIZES
    report = Report("decision_cost", {"policy": arguments.policy, "repeats": repeats, "sizes": sizes})
    found: dict[int, list[Cost]] = {size: [] for size in sizes}
    for seed in range(repeats):
        for size in sizes:
            decisions = max(20, DECISIONS[size] // (4 if arguments.quick else 1))
            found[size].append(measure(size, POLICIES[arguments.policy], decisions, seed))
    p50 = {size: Spread.of(one.p50 for one in costs) for size, costs in found.items()}
    p99 = {size: Spread.of(one.p99 for one in costs) for size, costs in found.items()}
    table(
        ("targets", "p50 µs", "p99 µs", "µs a target"),
        [(size, f"{p50[size]:.0f}", f"{p99[size]:.0f}", f"{p50[size].median / size:.2f}") for size in sizes],
    )
    report.figures["p50_us"] = {str(size): spread for size, spread in p50.items()}
    report.figures["p99_us"] = {str(size): spread for size, spread in p99.items()}
    report.goal(Goal("decision_p50_us_32_targets", p50[32].median, MEDIAN_GOAL_US, "<="))
    report.goal(Goal("decision_p99_us_32_targets", p99[32].median, P99_GOAL_US, "<="))
    report.write()


if __name__ == "__main__":
    main()

"""What a pool's batcher keeps of its goodput in overload, in virtual time: the real batcher on a device by its table.

Goals: at twice the rate at which 99 % are in time, goodput is at least nine tenths of its peak below that, and whoever
is refused hears so within 10 ms of arriving or of becoming hopeless. The policies that one may choose stand beside it.

    python -m tests.bench.pool_overload [--quick] [--repeats 5]
"""

from __future__ import annotations

from statistics import median

from tests.bench.harness import Goal, Report, parser, table
from tests.support.mqtt.one_device import Told, serve
from tidegate.models.manifest import BatchingPolicy

RATES = (60, 80, 100, 120, 130, 140, 150, 160, 180, 200)
POLICIES: tuple[BatchingPolicy, ...] = ("deadline", "none", "eager")
ATTAINED = 0.99


def knee_rps(by_rate: dict[int, list[Told]]) -> int:
    """The highest rate up to which enough were in time."""
    knee = RATES[0]
    for rate in RATES:
        if median(told.in_time / told.arrived for told in by_rate[rate]) < ATTAINED:
            break
        knee = rate
    return knee


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    repeats = arguments.repeats or (2 if arguments.quick else 5)
    seconds = 10.0 if arguments.quick else 40.0
    report = Report("pool_overload", {"repeats": repeats, "rates": RATES, "seconds": seconds, "budget_s": 0.25})
    rows = []
    for policy in POLICIES:

        def runs(rate: int, policy: BatchingPolicy = policy) -> list[Told]:
            return [serve(rate, seconds=seconds, seed=seed, policy=policy) for seed in range(repeats)]

        by_rate = {rate: runs(rate) for rate in RATES}
        knee = knee_rps(by_rate)
        twice = runs(2 * knee)
        goodput = median(told.goodput_rps for told in twice)
        peak = max(median(told.goodput_rps for told in found) for rate, found in by_rate.items() if rate <= 1.2 * knee)
        delay_ms = 1e3 * max(told.most_delay_s for told in twice)
        rows.append((policy, f"{knee}", f"{peak:.0f}", f"{goodput:.0f}", f"{goodput / peak:.2f}", f"{delay_ms:.1f}"))
        report.figures[policy] = {"knee_rps": knee, "peak_rps": peak, "at_twice_rps": goodput, "delay_ms": delay_ms}
        if policy == "deadline":
            report.goal(Goal("goodput_at_twice_the_load_over_peak", goodput / peak, 0.9, ">="))
            report.goal(Goal("refusals_after_hopeless_ms", delay_ms, 10.0, "<="))
    table(("policy", "99 % up to", "peak", "at twice that", "kept", "told after ms"), rows)
    report.write()


if __name__ == "__main__":
    main()

"""Run it: `python -m tests.bench.generate_routing [--quick] [--seconds 30] [--links NAMES] [--rules NAMES]`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from simulator.scenarios.scenario_file import LoadedScenario
from simulator.simulation import simulate
from tests.bench.generate_routing import __doc__ as words
from tests.bench.generate_routing.bench import Bench, Plan
from tests.bench.generate_routing.fleet import ALL_RULES
from tests.bench.generate_routing.workload import talk
from tests.bench.harness import Report, parser

LOADS = (0.3, 0.6, 0.9, 1.2)
LINKS = ("quiet", "jitter", "cellular")
_KNEE_POLICY, _KNEE_KEPT = "least-request", 0.9


def main() -> None:
    options = parser(words or "")
    options.add_argument("--links", default=",".join(LINKS), help="with commas")
    options.add_argument("--rules", default=",".join(ALL_RULES), help="with commas")
    options.add_argument("--loads", help="of the knee, with commas")
    options.add_argument("--keep", type=Path, help="folder for configurations and logs, kept")
    options.add_argument("--find-knee", action="store_true", help="only search for talk.yaml's knee_rps, in simulation")
    chosen = options.parse_args()
    if chosen.find_knee:
        print(f"knee: {find_knee(talk()):.1f} requests/s")
        return
    plan = Plan(
        seconds=chosen.seconds or (8.0 if chosen.quick else 30.0),
        learn_s=2.0 if chosen.quick else 3.0,
        loads=tuple(map(float, chosen.loads.split(","))) if chosen.loads else (0.9,) if chosen.quick else LOADS,
        links=("jitter",) if chosen.quick else tuple(chosen.links.split(",")),
        rules=tuple(chosen.rules.split(",")),
        repeats=chosen.repeats or 1,
    )
    report = Report("generate_routing", {**vars(plan), "knee_rps": talk().scenario.knee_rps})
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        folder = chosen.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(plan, report, folder)
        try:
            asyncio.run(bench.run())
        except BaseException:
            _show_logs(folder)
            raise
    bench.conclude()
    report.write()


def find_knee(loaded: LoadedScenario) -> float:
    """The rate at which a plain rule keeps the budgets of nine answers in ten, by bisection."""

    def keeps(rate: float) -> float:
        tallies = [
            simulate(loaded.replaced(loaded.scenario.with_rate(rate)), _KNEE_POLICY, seed).tally for seed in (1, 2)
        ]
        generations = [one.generations for one in tallies]
        return sum(one.kept for one in generations) / max(1, sum(one.requests for one in generations))

    low, high = 1.0, 64.0
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) >= _KNEE_KEPT else (low, middle)
    return low


def _show_logs(folder: Path) -> None:
    for path in sorted(folder.glob("*.log")):
        if said := path.read_text(errors="replace")[-2000:].strip():
            print(f"== {path.name}\n{said}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Ten thousand devices and a million requests in one run on one core: how fast, and whether memory stays flat.

The scenario is `simulator/scenarios/big_fleet.yaml`. Memory is the process's resident set when a tenth of the requests'
time is over, when everything that a run makes once has been made, and at the end. Speed is requests by the thread's own
CPU time, the building of the world left out. `--requests` takes a prefix of the scenario.

    python -m tests.bench.big_fleet [--quick] [--requests 1000000] [--policy value]
"""

from __future__ import annotations

from time import process_time

import psutil

from simulator.scenarios.scenario_file import load
from simulator.simulation import World
from tests.bench.harness import Goal, Report, parser, table

FULL, QUICK = 1_000_000, 10_000
GROWTH_GOAL = 0.10
DEVICES_GOAL = 10_000


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--policy", default="value")
    options.add_argument("--requests", type=int, help="about so many, of the scenario's million")
    arguments = options.parse_args()
    wanted = arguments.requests or (QUICK if arguments.quick else FULL)
    loaded = load("big_fleet")
    scenario = loaded.scenario
    loaded = loaded.replaced(scenario.lasting(wanted / scenario.arrivals.rate))
    process, rss_mib = psutil.Process(), dict[int, float]()

    def note(share: float) -> None:
        rss_mib[round(100 * share)] = process.memory_info().rss / 2**20

    began = process_time()
    world = World(loaded, arguments.policy, 1)
    built = process_time()
    run = world.run(note)
    took_s = process_time() - built
    requests = run.tally.all.arrivals + run.tally.warmup.arrivals
    devices = sum(worker.startswith("edge/") for worker in world.workers)
    growth = rss_mib[100] / rss_mib[10] - 1.0
    table(
        ("devices", "requests", "events", "build s", "run s", "requests/s", "RSS at 10 %", "RSS at 100 %", "in time"),
        [
            (
                devices, requests, run.events, f"{built - began:.1f}", f"{took_s:.0f}", f"{requests / took_s:.0f}",
                f"{rss_mib[10]:.0f} MiB", f"{rss_mib[100]:.0f} MiB", f"{run.tally.all.attainment:.4f}",
            )
        ],
    )  # fmt: skip
    report = Report("big_fleet", {"policy": arguments.policy, "requests": wanted})
    report.figures |= {
        "requests_per_cpu_s": requests / took_s,
        "events_per_cpu_s": run.events / took_s,
        "rss_mib": {str(share): rss for share, rss in rss_mib.items()},
        "attainment": run.tally.all.attainment,
    }
    report.goal(Goal("big_fleet_devices", devices, DEVICES_GOAL))
    report.goal(Goal("big_fleet_requests", requests, 0.99 * FULL))
    report.goal(Goal("big_fleet_rss_growth", growth, GROWTH_GOAL, "<="))
    report.write()


if __name__ == "__main__":
    main()

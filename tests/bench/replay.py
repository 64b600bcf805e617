"""Does a replay tell the truth? Real traffic is recorded, replayed in the simulator, and held against what it was.

    same      recorded under a policy and replayed under the same: attainment and median latency against the recording's
    what if   recorded under one policy and replayed under the other, against a real run of the other with the same
              requests: whether the answer to the question would have been right

The fleet is `sim_vs_real`'s paced one, as processes; the gateway that is recorded begins knowing nothing, as the
simulated one does, and both leave out the same first seconds. Beside that, what the flight recorder costs: CPU time a
request to remember it, and the bytes that a full memory really takes of a fleet of 10,000 devices.

A what-if answer is held against a run at another time, so it is told no better than two live runs agree. On a busy
machine (two cores at a load of 4 to 8) six live runs of the same requests at load 1.2 attained 91.1 to 95.2 % under
`value` and 73.4 to 91.3 % under `cheapest`; replayed under its own policy the worst of them attained 72.7 %. Look at
the median of several repeats.

    python -m tests.bench.replay [--quick] [--repeats 3] [--seconds 30]
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from statistics import median
from time import thread_time_ns
from typing import Any, Final

from msgspec.structs import replace

from gateway.core.history.decision_record import pack_decision
from gateway.core.history.recorder import FlightRecorder
from gateway.core.placement.placer import Decision
from gateway.core.placement.utility import UtilityPlacer
from simulator.replay.replay import Replay, replay
from simulator.simulation import simulate
from tests.bench.harness import Goal, Report, Spread, parser, table
from tests.bench.sim_vs_real import sent
from tests.bench.sim_vs_real_fleets import Paced
from tests.support.faults.fleet_stack import FleetStack
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tests.support.gateway.flowns import request_record
from tidegate import clock

POLICIES: Final = ("value", "cheapest")
LOADS: Final = (0.6, 0.9, 1.2)
AIM: Final = 0.05
MOST_BYTES: Final = 2**25
_LEAD_S: Final = 1.0  # from the beginning of a recording to the first request


def recorded(
    fleet: Paced, stack: FleetStack, scratch: Path, policy: str, rate: float, seconds: float, seed: int
) -> Path:
    """A recording of one run."""
    stack.restart_gateway(policy=policy)
    path = scratch / f"{policy}-{rate:.0f}-{seed}.tgz"
    admin = "http://" + stack.gateway.addresses["admin"].removeprefix("http://")
    words = ["record", "--for", f"{seconds + _LEAD_S + 1.0:g}s", "-o", str(path), "--admin", admin]
    with subprocess.Popen([sys.executable, "-m", "tidegate.cli", *words], stdout=subprocess.DEVNULL) as recording:
        asyncio.run(clock.sleep(_LEAD_S))
        command: dict[str, Any] = {
            "scenario": str(fleet.path), "rate": rate, "seconds": seconds, "seed": seed, "model": fleet.model,
            "port": int(stack.http.rpartition(":")[2]), "answers": str(scratch / "answers.json"), "tokens": [],
        }  # fmt: skip
        asyncio.run(sent(command))
        recording.wait(60)
    return path


def attained(one: Replay, policy: str, seed: int) -> float:
    return simulate(one.loaded, policy, seed).tally.all.attainment


def compare(report: Report, loads: tuple[float, ...], repeats: int, seconds: float) -> None:
    fleet = Paced()
    found: dict[tuple[str, str, float], list[tuple[float, float]]] = {}  # (what, policy, load) → (real, replayed)
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        scratch = Path(folder)
        with fleet.stack(scratch) as stack:
            for repeat in range(1, repeats + 1):
                for load in loads:
                    rate = load * fleet.knee_rps
                    paths = {one: recorded(fleet, stack, scratch, one, rate, seconds, repeat) for one in POLICIES}
                    was = {policy: replay(path) for policy, path in paths.items()}
                    for policy, other in (POLICIES, POLICIES[::-1]):
                        same, instead = attained(was[policy], policy, repeat), attained(was[policy], other, repeat)
                        found.setdefault(("same", policy, load), []).append((was[policy].attainment, same))
                        found.setdefault(("what if", other, load), []).append((was[other].attainment, instead))
    rows = []
    for (what, policy, load), pairs in found.items():
        gap = Spread.of(replayed - real for real, replayed in pairs)
        real, replayed = (Spread.of(100.0 * one[side] for one in pairs) for side in (0, 1))
        rows.append((f"{what}: {policy} at {load:g}", f"{real:.1f}", f"{replayed:.1f}", f"{100.0 * gap.median:+.1f}"))
        name = f"{what.replace(' ', '_')}_{policy}_at_{load:g}_attainment_gap"
        report.figures[name] = gap
        report.goal(Goal(name, abs(gap.median), AIM, "<="))
    table(("", "real %", "replayed %", "points"), rows)


def cost(report: Report, requests: int) -> None:
    """Of remembering, by the number of targets."""
    for targets in (3, 32, 10_000):
        fleet = fleet_of(**{f"edge_{n}": variant(compute_s=0.01 + 1e-6 * n) for n in range(targets)})
        placer = UtilityPlacer(fleet)
        decisions = [placer.decide(ask(), NOW) for _ in range(50)]
        report.figures[f"remember_us_of_{targets}"] = took = _remembering_us(decisions, requests)
        report.figures[f"held_of_{targets}"] = held = _held(placer)
        print(
            f"{targets} targets: {took:.1f} us a request; {held['requests']} in {held['traced_bytes'] / 2**20:.1f} MiB"
        )
    full = report.figures["held_of_10000"]["traced_bytes"]
    report.goal(Goal("a_full_memory_of_10000_targets_in_bytes", full, MOST_BYTES, "<="))


def _remembering_us(decisions: list[Decision], requests: int) -> Spread:
    memory, one = FlightRecorder(4096, MOST_BYTES), request_record()
    samples = []
    for _ in range(5):
        began_ns = thread_time_ns()
        for number in range(requests):
            memory.add(replace(one, number=number, decision=pack_decision(decisions[number % len(decisions)])))
        samples.append((thread_time_ns() - began_ns) / requests / 1e3)
    return Spread.of(samples)


def _held(placer: UtilityPlacer) -> dict[str, float]:
    """What a memory without a limit of requests holds when it is full, and what that takes."""
    gc.collect()
    tracemalloc.start()
    memory, number = FlightRecorder(10**9, MOST_BYTES), 0
    while len(memory) == number:
        number += 1
        fresh = request_record(number=number)
        memory.add(replace(fresh, request_id=f"request {number}", decision=pack_decision(placer.decide(ask(), NOW))))
    gc.collect()
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"requests": len(memory), "reckoned_bytes": memory.held_bytes, "traced_bytes": traced}


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    repeats, seconds = chosen.repeats or (1 if chosen.quick else 3), chosen.seconds or (12.0 if chosen.quick else 30.0)
    loads = LOADS[1:2] if chosen.quick else LOADS
    report = Report("replay", {"repeats": repeats, "seconds": seconds, "loads": loads, "policies": POLICIES})
    cost(report, 500 if chosen.quick else 2000)
    compare(report, loads, repeats, seconds)
    gaps = [abs(one.median) for name, one in report.figures.items() if name.startswith("same_")]
    report.figures["median_same_gap"] = median(gaps)
    report.write()


if __name__ == "__main__":
    main()

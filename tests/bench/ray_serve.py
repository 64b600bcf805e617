"""What Ray Serve around a pool costs: the same pool as a process of its own, and as a replica that Serve keeps.

    callers ──one link stream──▶ `tidegate pool`
            ──the same─────────▶ a replica of `cloud_pool.ray_serve:app`, straight to its own port

One replica each, of a paced model that takes 50 µs, in turn within each repeat, in a network of their own. CPU a
request is of the serving process and its workers; Ray's own processes are not in it, which at rest are some 1.6 GB and
hardly any CPU.

Then, in full runs, how many of 40 requests a second fail while Ray's control store is away for 15 s, and the head for
120 s, with the state of the cluster in Redis; and while replicas are killed, scaled and updated. `tests/e2e/ray_serve`
has the same with shorter times (`tests/support/ray/scenario.py`).

    python -m tests.bench.ray_serve [--quick] [--repeats 5] [--seconds 3]
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.bench.harness import Child, Goal, Report, Spread, parser, ratios, table
from tests.support.faults.fleet_stack import Part
from tests.support.mqtt.brokers import Mosquitto
from tests.support.ray.cluster import RayCluster
from tests.support.ray.own_network import in_own_network
from tests.support.ray.scenario import Scenario
from tests.support.stores import REDIS
from tidegate import clock
from tidegate.tools.build.demo.paced import PacedCosts, PacedNoise, add_paced

MODEL: Final = "instant"
LOADS: Final = (1, 64)
PORTS: Final = {"plain": 18201, "ray": 18101}
LEAST_THROUGHPUT: Final = 0.95
MOST_CPU: Final = 1.10
MOST_P50: Final = 1.10
CONTROL_AWAY_S: Final = 15.0
HEAD_AWAY_S: Final = 120.0
RATE: Final = 40.0
BUDGET_S: Final = 4.0
# A goal, and the phases of the scenario that it counts: also until Serve has scaled once it was back.
LOSSES: Final = {
    "control_away_15s.failed": ("control_away", "control_back"),
    "head_away_120s.failed": ("head_away", "head_back"),
    "replicas_come_and_go.failed": ("killed", "updated", "fewer"),
}
_INSIDE: Final = "TIDEGATE_BENCH_INSIDE"


def pool_keys(folder: Path, port: int, broker: int) -> dict[str, Any]:
    return {
        "name": "pool" if port == PORTS["ray"] else "plain",
        "grpc_port": port,
        "mqtt": f"mqtt://127.0.0.1:{broker}",
        "model_repository": str(folder / "models"),
        "device": "cpu",
        "threads": 1,
        "log_level": "warning",
    }


def cpu_s(pid: int) -> float:
    """Of a process and its children, so far."""
    one = psutil.Process(pid)
    times = [process.cpu_times() for process in (one, *one.children(recursive=True))]
    return sum(found.user + found.system for found in times)


async def measure(report: Report, folder: Path, repeats: int, seconds: float) -> None:
    costs = PacedCosts(pool_ms=((1.0, 0.05), (1024.0, 0.05)), max_batch=64)
    add_paced(MODEL, costs, folder / "models", noise=PacedNoise(0.0, 0.0))
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        broker = stack.enter_context(Mosquitto(folder))
        plain = Part("plain", "cloud_pool", pool_keys(folder, PORTS["plain"], broker.port), folder)
        plain.start()
        stack.callback(plain.stop)
        plain.wait_ready()
        (folder / "pool.yaml").write_text(yaml.safe_dump(pool_keys(folder, PORTS["ray"], broker.port)))
        cluster = stack.enter_context(RayCluster(folder))
        cluster.deploy(config=str(folder / "pool.yaml"), replicas=1, cpus=0.2)
        ends_at = clock.now() + 60.0
        while not cluster.status().startswith("RUNNING"):
            if clock.now() > ends_at:
                raise SystemExit(f"Serve has no replica: {cluster.status()}\n{cluster.log}")
            await clock.sleep(0.5)
        (replica,) = (pid for pid, _ in cluster.replicas().values())
        pids = {"plain": plain.pid, "ray": cluster.head.process(replica).pid}
        callers = {
            name: await stack.enter_async_context(
                Child(f"callers of {name}", "-m", "tests.bench.text_callers", MODEL, str(port))
            )
            for name, port in PORTS.items()
        }
        for repeat in range(repeats):
            for at_once in LOADS:
                for name, child in callers.items():
                    before = cpu_s(pids[name])
                    await child.command(callers=at_once, texts=1, seconds=seconds)
                    told = await child.line()
                    told["cpu_us"] = 1e6 * (cpu_s(pids[name]) - before) / told["requests"]
                    found.setdefault((name, at_once), []).append(told)
            print(f"repeat {repeat + 1} of {repeats} done", file=sys.stderr, flush=True)
    judge(report, found)


def judge(report: Report, found: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    rows = []
    for (name, at_once), all_told in found.items():
        spread = {key: Spread.of(one[key] for one in all_told) for key in ("texts_per_s", "p50_s", "cpu_us", "failed")}
        report.figures[f"{name}.c{at_once}"] = spread
        rate, p50, cpu = spread["texts_per_s"], 1e3 * spread["p50_s"].median, spread["cpu_us"]
        rows.append((f"{name}, {at_once} at once", f"{rate:.0f}", f"{p50:.2f}", f"{cpu:.0f}"))
    table(("", "requests/s", "p50 ms", "CPU µs a request"), rows)

    def ratio(key: str, at_once: int) -> Spread:
        return ratios([one[key] for one in found["ray", at_once]], [one[key] for one in found["plain", at_once]])

    for name, key, at_once, aim, sense in (
        ("throughput_c64", "texts_per_s", 64, LEAST_THROUGHPUT, ">="),
        ("cpu_c64", "cpu_us", 64, MOST_CPU, "<="),
        ("p50_c1", "p50_s", 1, MOST_P50, "<="),
    ):
        of_plain = report.figures[f"{name}.of_plain"] = ratio(key, at_once)
        report.goal(Goal(f"{name}.of_plain", of_plain.median, aim, sense))
    failed = sum(one["failed"] for all_told in found.values() for one in all_told)
    report.goal(Goal("failed", float(failed), 0.0, "<="))


def judge_losses(report: Report, told: dict[str, Any] | None, why: str = "") -> None:
    """What the scenario told; None: it did not run, and why."""
    if told is None:
        for name in LOSSES:
            report.goal(Goal(name, None, 0.0, "<=", why=why))
        report.goal(Goal("replicas_are_the_same_processes", None, 1.0, why=why))
        return
    failed = {phase: len(told["failed"].get(phase, [])) for phase in told["sent"]}
    report.figures["losses"] = {
        phase: {"sent": sent, "failed": failed[phase], "slowest_s": told["slowest_s"][phase]}
        for phase, sent in told["sent"].items()
    }
    for name in ("control_back_s", "scaled_s", "head_back_s", "scaled_after_head_s", "ended_by_ray_s"):
        report.figures[f"losses.{name}"] = told[name]
    table(
        ("lost, with 40 requests a second", "sent", "failed", "slowest s"),
        [
            (phase, str(sent), str(failed[phase]), f"{told['slowest_s'][phase]:.2f}")
            for phase, sent in told["sent"].items()
        ],
    )
    for name, phases in LOSSES.items():
        report.goal(Goal(name, float(sum(failed[phase] for phase in phases)), 0.0, "<="))
    same = told["control_same"] and told["head_same"]
    report.goal(Goal("replicas_are_the_same_processes", float(same), 1.0))


def lose(report: Report, folder: Path, quick: bool) -> None:
    if quick or REDIS is None:
        judge_losses(report, None, "only in full runs" if quick else "redis-server is not installed")
        return
    folder.mkdir()
    judge_losses(report, asyncio.run(Scenario(folder, CONTROL_AWAY_S, HEAD_AWAY_S, RATE, BUDGET_S).run()))


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    alone = in_own_network()
    if alone is None:
        report = Report("ray_serve", {})
        report.goal(Goal("ray_serve", None, 1.0, why="needs `make ray` and a network namespace of its own"))
        report.write()
        return
    if not os.environ.get(_INSIDE):
        os.environ[_INSIDE] = "1"
        os.execvp(alone[0], [*alone, sys.executable, "-m", "tests.bench.ray_serve", *sys.argv[1:]])
    repeats, seconds = chosen.repeats or (2 if chosen.quick else 5), chosen.seconds or (2.0 if chosen.quick else 3.0)
    report = Report("ray_serve", {"repeats": repeats, "seconds": seconds, "callers": LOADS})
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        asyncio.run(measure(report, Path(folder), repeats, seconds))
        lose(report, Path(folder) / "losses", chosen.quick)
    report.write()


if __name__ == "__main__":
    main()

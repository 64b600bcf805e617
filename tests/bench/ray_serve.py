"""What Ray Serve around a pool costs: the same pool as a process of its own, and as a replica that Serve keeps.

    callers ──one link stream──▶ `tidegate pool`
            ──the same─────────▶ a replica of `cloud_pool.ray_serve:app`, straight to its own port

One replica each, of a paced model that takes 50 µs, in turn within each repeat, in a network of their own. CPU a
request is of the serving process and its workers; Ray's own processes are not in it, which at rest are some 1.6 GB and
hardly any CPU. What happens while replicas are killed, scaled and updated is tried by `tests/e2e/ray_serve`.

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
from tests.support.ray.scenario import in_own_network
from tidegate import clock
from tidegate.tools.build.demo.paced import PacedCosts, PacedNoise, add_paced

MODEL: Final = "instant"
LOADS: Final = (1, 64)
PORTS: Final = {"plain": 18201, "ray": 18101}
LEAST_THROUGHPUT: Final = 0.95
MOST_CPU: Final = 1.10
MOST_P50: Final = 1.10
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
        pids = {"plain": plain.pid, "ray": replica}
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
    report.write()


if __name__ == "__main__":
    main()

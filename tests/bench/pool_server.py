"""What a pool server costs a request: a closed loop against an instant model, beside a bare echo of the same frames.

    caller ──one link stream, or unary OIP──▶ pool server ──▶ its worker, whose model takes 50 µs (`engine: paced`)
           ──the same────────────────────────▶ echo (`pool_echo.py`): parses and answers, and serves nothing

A model that takes hardly any time leaves what the server itself takes: frames, checks, the queue, batches, the way to
the worker and back. A device that computes 20,000 texts a second starves behind a server that takes more than 50 µs of
one core for each. Both sides see the same bytes from the same caller in the same run, in turn within each repeat. What
is measured has one core to itself; caller and worker share the other. CPU a request is that of the server's process,
with gRPC's threads, and of its worker beside it; rates on a busy machine mean little, CPU a request means much.

`added` is the median latency of one caller, less that of the echo and less the model's 50 µs.

Then two servers of a pool (`servers: 2`), each asked by a caller of its own at once, beside the same two callers at one
server: `servers_cpu` is what a request costs the servers' processes together over what it costs the one. Where that is
1, N servers on N cores give N times the rate; `servers_rps` is the rate itself, which takes four cores to be seen.

    python -m tests.bench.pool_server [--quick] [--repeats 5] [--seconds 3] [--only link|unary]
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.bench import workload
from tests.bench.gateway_overhead import Timing
from tests.bench.harness import Child, Goal, Report, Spread, cores, parser, ratios, table
from tidegate.testing.ports import free_ports
from tidegate.tools.build.demo.paced import PacedCosts, PacedNoise, add_paced

CONCURRENCY: Final = (1, 8, 64, 256)
TRANSPORTS: Final = ("link", "unary")
MODEL_S: Final = 50e-6
MIN_RPS: Final = 12_000.0
MAX_SERVER_CPU_US: Final = {1: 350.0, 64: 80.0, 256: 60.0}
MAX_P50_ADDED_S: Final = 0.4e-3
MIN_UNARY_RATIO: Final = 0.5
SERVERS: Final = 2
MAX_SERVERS_CPU: Final = 1.1
MIN_SERVERS_RPS: Final = 1.5


@dataclass(frozen=True)
class Point:
    """One measurement. CPU is per request: of the server's process, and of its worker."""

    rps: float
    p50_s: float
    p99_s: float
    server_cpu_s: float
    worker_cpu_s: float
    errors: int


@dataclass(frozen=True)
class System:
    """A server under measurement, and its worker processes, if it has any."""

    child: Child
    address: str
    workers: tuple[psutil.Process, ...] = ()

    def cpu_s(self) -> tuple[float, float]:
        return self.child.cpu_s(), sum(sum(one.cpu_times()[:2]) for one in self.workers)


Points = dict[tuple[str, str, int], list[Point]]  # by transport, system and concurrency


async def measure(system: System, generator: Child, transport: str, connections: int, timing: Timing) -> Point:
    await generator.command(
        transport=transport,
        address=system.address,
        connections=connections,
        warmup_s=timing.warmup_s,
        seconds=timing.seconds,
    )
    await generator.line()
    before = system.cpu_s()
    found = await generator.line()
    server_s, worker_s = (now - then for now, then in zip(system.cpu_s(), before, strict=True))
    requests = max(found["requests"], 1)
    return Point(
        rps=found["requests"] / found["elapsed_s"],
        p50_s=found["p50_s"],
        p99_s=found["p99_s"],
        server_cpu_s=server_s / requests,
        worker_cpu_s=worker_s / requests,
        errors=found["errors"],
    )


async def measure_all(
    systems: dict[str, System], generator: Child, transports: Sequence[str], timing: Timing
) -> Points:
    """Every system by every way at every concurrency, in turn, `repeats` times; every second repeat backwards."""
    order = [(way, name, c) for way in transports for c in CONCURRENCY for name in systems]
    points: Points = {key: [] for key in order}
    for repeat in range(timing.repeats):
        for way, name, connections in order if repeat % 2 == 0 else reversed(order):
            points[way, name, connections].append(await measure(systems[name], generator, way, connections, timing))
        print(f"repeat {repeat + 1} of {timing.repeats} done", file=sys.stderr, flush=True)
    return points


def pool_config(scratch: Path, **more: Any) -> Path:
    """The configuration of a pool with the instant model."""
    models = scratch / "models"
    costs = PacedCosts(pool_ms=((1.0, 1e3 * MODEL_S), (8192.0, 1e3 * MODEL_S)))
    add_paced(workload.MODEL, costs, models, noise=PacedNoise(pool=0.0))
    config = scratch / "pool.yaml"
    words = {"name": "bench", "grpc_port": 0, "model_repository": str(models), "device": "cpu", "log_level": "error"}
    config.write_text(yaml.safe_dump({**words, **more}))
    return config


async def start_pool(
    stack: AsyncExitStack, scratch: Path, core: int | None, other_core: int | None, through: tuple[str, ...] = ()
) -> System:
    """A real pool with one worker and the instant model, its worker on the other core.

    `through`: a module with its words that runs the process's.
    """
    config = pool_config(scratch)
    command = ("-m", *through, "cloud_pool", "--config", str(config))
    child = await stack.enter_async_context(Child("pool", *command, core=core, log=scratch / "pool.log"))
    while child.ready["event"] != "ready":
        child.ready = await child.line()
    workers = tuple(psutil.Process(child.pid).children())
    if other_core is not None:
        for thread in [thread.id for worker in workers for thread in worker.threads()]:
            os.sched_setaffinity(thread, {other_core})
    return System(child, child.ready["addresses"]["grpc"], workers)


# several servers


@dataclass(frozen=True)
class SideBySide:
    """Two callers at once: requests a second of both, and what a request costs the servers' processes."""

    rps: float
    server_cpu_s: float


async def start_servers(stack: AsyncExitStack, scratch: Path) -> tuple[list[str], list[psutil.Process]]:
    """The servers of one pool: their addresses and processes."""
    config = pool_config(scratch, grpc_port=free_ports(SERVERS), servers=SERVERS)
    command = ("-m", "cloud_pool", "--config", str(config))
    child = await stack.enter_async_context(Child("servers", *command, log=scratch / "servers.log"))
    while child.ready["event"] != "ready":
        child.ready = await child.line()
    servers = child.ready["servers"].values()
    return [one["addresses"]["grpc"] for one in servers], [psutil.Process(one["pid"]) for one in servers]


async def side_by_side(
    addresses: Sequence[str], processes: Sequence[psutil.Process], callers: Sequence[Child], timing: Timing
) -> SideBySide:
    """Args: addresses: of each caller's server."""
    for caller, address in zip(callers, addresses, strict=True):
        await caller.command(
            transport="link", address=address, connections=64, warmup_s=timing.warmup_s, seconds=timing.seconds
        )
    for caller in callers:
        await caller.line()
    before = sum(sum(one.cpu_times()[:2]) for one in processes)
    found = [await caller.line() for caller in callers]
    took_s = sum(sum(one.cpu_times()[:2]) for one in processes) - before
    requests = sum(one["requests"] for one in found)
    return SideBySide(sum(one["requests"] / one["elapsed_s"] for one in found), took_s / max(1, requests))


async def measure_servers(scratch: Path, timing: Timing) -> dict[str, list[SideBySide]]:
    """One server and several, in turn, asked by as many callers."""
    points: dict[str, list[SideBySide]] = {"one": [], "several": []}
    async with AsyncExitStack() as stack:
        for name in ("alone", "together"):
            (scratch / name).mkdir()
        one = await start_pool(stack, scratch / "alone", None, None)
        addresses, processes = await start_servers(stack, scratch / "together")
        callers = [
            await stack.enter_async_context(Child(f"caller {number}", "-m", "tests.bench.pool_caller"))
            for number in range(SERVERS)
        ]
        alone = [one.address] * SERVERS, [psutil.Process(one.child.pid)]
        for repeat in range(timing.repeats):
            systems = [("one", alone), ("several", (addresses, processes))]
            for name, (where, whose) in systems if repeat % 2 == 0 else reversed(systems):
                points[name].append(await side_by_side(where, whose, callers, timing))
    return points


def judge_servers(report: Report, points: dict[str, list[SideBySide]]) -> None:
    found = {
        field: ratios(
            [getattr(one, field) for one in points["several"]], [getattr(one, field) for one in points["one"]]
        )
        for field in ("server_cpu_s", "rps")
    }
    report.figures |= {"servers_cpu": found["server_cpu_s"], "servers_rps": found["rps"]}
    print(f"{SERVERS} servers over one: CPU a request {found['server_cpu_s']:.2f}, rate {found['rps']:.2f}")
    report.goal(Goal("servers_cpu", found["server_cpu_s"].median, MAX_SERVERS_CPU, "<="))
    has_cores = len(os.sched_getaffinity(0)) >= 2 * SERVERS
    why = "" if has_cores else f"takes {2 * SERVERS} cores: callers and workers have to run beside the servers"
    report.goal(Goal("servers_rps", found["rps"].median if has_cores else None, MIN_SERVERS_RPS, why=why))


# what is printed


def spread(points: list[Point], field: str, scale: float = 1.0) -> Spread:
    return Spread.of(getattr(point, field) * scale for point in points)


def over_echo(points: Points, way: str, connections: int, field: str) -> Spread:
    pool, echo = points[way, "pool", connections], points[way, "echo", connections]
    return ratios([getattr(point, field) for point in pool], [getattr(point, field) for point in echo])


def show(points: Points) -> None:
    rows = [
        (
            f"{way} {name} c={connections}",
            f"{spread(found, 'rps'):.0f}",
            f"{spread(found, 'p50_s', 1e3):.2f}",
            f"{spread(found, 'server_cpu_s', 1e6):.0f}",
            f"{spread(found, 'worker_cpu_s', 1e6).median:.0f}" if name == "pool" else "-",
            f"{over_echo(points, way, connections, 'rps').median:.2f}" if name == "pool" else "",
            f"{over_echo(points, way, connections, 'server_cpu_s').median:.2f}" if name == "pool" else "",
            sum(point.errors for point in found),
        )
        for (way, name, connections), found in points.items()
    ]
    header = ("", "req/s", "p50 ms", "server CPU µs/req", "worker's", "rate/echo", "CPU/echo", "errors")
    table(header, rows)


def figures(points: Points) -> dict[str, Any]:
    fields = ("rps", "p50_s", "p99_s", "server_cpu_s", "worker_cpu_s")
    found: dict[str, Any] = {
        f"{way} {name} c={c}": {field: spread(of, field) for field in fields} for (way, name, c), of in points.items()
    }
    pools = [(way, c) for way, name, c in points if name == "pool"]
    found["over_echo"] = {
        f"{way} c={c}": {field: over_echo(points, way, c, field) for field in ("rps", "p50_s", "server_cpu_s")}
        for way, c in pools
    }
    return found


def best_rps(points: Points, way: str) -> float:
    return max(spread(points[way, "pool", c], "rps").median for c in CONCURRENCY)


def p50_added_s(points: Points, way: str) -> Spread:
    """What one caller waits beyond the echo's answer and the model's own time, repeat by repeat."""
    pairs = zip(points[way, "pool", 1], points[way, "echo", 1], strict=True)
    return Spread.of(pool.p50_s - echo.p50_s - MODEL_S for pool, echo in pairs)


def judge(report: Report, points: Points, transports: Sequence[str]) -> None:
    errors = sum(point.errors for (_, name, _), found in points.items() if name == "pool" for point in found)
    report.goal(Goal("pool_errors", float(errors), 0.0, "<="))
    if "link" in transports:
        report.goal(Goal("link_best_rps", best_rps(points, "link"), MIN_RPS))
        for connections, most_us in MAX_SERVER_CPU_US.items():
            cpu_us = spread(points["link", "pool", connections], "server_cpu_s", 1e6).median
            report.goal(Goal(f"link_server_cpu_us_c{connections}", cpu_us, most_us, "<="))
        added = p50_added_s(points, "link")
        report.figures["link_p50_added_s_c1"] = added
        report.goal(Goal("link_p50_added_ms_c1", added.median * 1e3, MAX_P50_ADDED_S * 1e3, "<="))
    if set(TRANSPORTS) <= set(transports):
        ratio = best_rps(points, "unary") / best_rps(points, "link")
        report.goal(Goal("unary_best_rps_of_link", ratio, MIN_UNARY_RATIO))


# the benchmark


async def bench(timing: Timing, transports: Sequence[str]) -> Report:
    config = {**vars(timing), "concurrency": CONCURRENCY, "model_s": MODEL_S, "pinned": cores()}
    report = Report("pool_server", config)
    core, other_core = cores()
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        echo = await stack.enter_async_context(Child("echo", "-m", "tests.bench.pool_echo", core=core))
        systems = {
            "echo": System(echo, echo.ready["addresses"]["grpc"]),
            "pool": await start_pool(stack, scratch, core, other_core),
        }
        generator = await stack.enter_async_context(Child("caller", "-m", "tests.bench.pool_caller", core=other_core))
        points = await measure_all(systems, generator, transports, timing)
    show(points)
    report.figures |= figures(points)
    judge(report, points, transports)
    if "link" in transports:
        with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as scratch_name:
            judge_servers(report, await measure_servers(Path(scratch_name), timing))
    return report


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--only", choices=TRANSPORTS, help="one way in instead of both")
    chosen = options.parse_args()
    quick = Timing(2, 0.7, 0.3) if chosen.quick else Timing(5, 3.0, 0.7)
    timing = Timing(chosen.repeats or quick.repeats, chosen.seconds or quick.seconds, quick.warmup_s)
    asyncio.run(bench(timing, (chosen.only,) if chosen.only else TRANSPORTS)).write()


if __name__ == "__main__":
    main()

"""What the gateway costs: a closed loop through it to instant targets, against the least that a forwarder can do.

    load generator ──HTTP──▶ gateway over link  ┐
                   ──HTTP──▶ gateway over unary ├──▶ three instant targets in a process of their own
                   ──HTTP──▶ floor forwarder    ┘

The floor is `floor_forwarder.py`, some 40 lines of aiohttp and grpc.aio without a check, a choice or a deadline. All
three see the same bytes from the same load generator in the same run, one after the other within each repeat. What is
measured has one core to itself, load generator and targets share the other. The hop alone, without a gateway around
it, is measured as well, and one more run under a profiler says what the gateway's CPU is spent on.

    python -m tests.bench.gateway_overhead [--quick] [--repeats 5] [--seconds 3] [--no-profile]
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.bench import workload
from tests.bench.harness import RESULTS, Child, Goal, Report, Spread, cores, parser, ratios, table
from tidegate.testing.ports import free_port

CONCURRENCY = (1, 16, 64)
SYSTEMS = ("floor", "unary", "link")
MIN_THROUGHPUT_RATIO = 0.8
STRETCH_THROUGHPUT_RATIO = 1.0
MAX_P50_RATIO = 1.2
MAX_LINK_HOP_S = 110e-6  # docs/design/numbers.md, "gRPC from Python": 101-155 µs on a stream without coalescing


@dataclass(frozen=True)
class Point:
    """One measurement. CPU is that of the measured process, per request."""

    rps: float
    p50_s: float
    p99_s: float
    cpu_s: float
    others_cpu_s: float  # of load generator and targets
    errors: int


@dataclass(frozen=True)
class Timing:
    repeats: int
    seconds: float
    warmup_s: float


@dataclass(frozen=True)
class Measured:
    """A process under measurement, and who sends it requests; `port` None where it sends them itself."""

    child: Child
    generator: Child
    port: int | None


async def measure(what: Measured, others: list[Child], connections: int, timing: Timing) -> Point:
    words: dict[str, Any] = {"connections": connections, "warmup_s": timing.warmup_s, "seconds": timing.seconds}
    await what.generator.command(**words, **({} if what.port is None else {"port": what.port}))
    await what.generator.line()
    cpu_before, others_before = what.child.cpu_s(), sum(other.cpu_s() for other in others)
    found = await what.generator.line()
    cpu_s, others_s = what.child.cpu_s() - cpu_before, sum(other.cpu_s() for other in others) - others_before
    requests = max(found["requests"], 1)
    return Point(
        rps=found["requests"] / found["elapsed_s"],
        p50_s=found["p50_s"],
        p99_s=found["p99_s"],
        cpu_s=cpu_s / requests,
        others_cpu_s=others_s / requests,
        errors=found["errors"],
    )


Points = dict[tuple[str, int], list[Point]]


async def measure_all(systems: dict[str, Measured], others: list[Child], timing: Timing) -> Points:
    """Every system at every concurrency, in turn, `repeats` times; every second repeat backwards."""
    points: Points = {(name, c): [] for name in systems for c in CONCURRENCY}
    for repeat in range(timing.repeats):
        order = [(name, c) for c in CONCURRENCY for name in systems]
        for name, connections in order if repeat % 2 == 0 else reversed(order):
            points[name, connections].append(await measure(systems[name], others, connections, timing))
        print(f"repeat {repeat + 1} of {timing.repeats} done", file=sys.stderr, flush=True)
    return points


@asynccontextmanager
async def gateway(
    transport: str,
    ports: list[int],
    scratch: Path,
    *,
    core: int | None,
    through: tuple[str, ...] = (),
    name: str = "",
    module: str = "gateway",
    python: Path = Path(sys.executable),
    flags: tuple[str, ...] = (),
    **more: Any,
) -> AsyncIterator[tuple[Child, int]]:
    """A real gateway process with the instant targets behind it.

    `flags` are Python's; `more` is configuration; `through`: a module with its words that runs the process's.
    """
    config = scratch / f"gateway-{name or transport}{'-watched' if through else ''}.yaml"
    foreign = transport == "unary"
    targets = [
        {
            "name": str(number),
            "tier": "pool",
            "address": f"127.0.0.1:{port}",
            "transport": transport,
            "foreign": foreign,
        }
        | ({"models": [workload.MODEL]} if foreign else {})
        for number, port in enumerate(ports)
    ]
    words = {"name": "bench", "http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0, "targets": targets}
    fixed = {"model_repository": str(scratch / "models"), "log_level": "error"}
    config.write_text(yaml.safe_dump({**words, **fixed, **more}))
    command = [*flags, "-m", *through, module, "--config", str(config)]
    log = config.with_suffix(".log")
    async with Child(name or f"gateway over {transport}", *command, core=core, log=log, python=python) as child:
        yield child, int(child.ready["addresses"]["http"].rpartition(":")[2])


async def profiled(transport: str, ports: list[int], scratch: Path, generator: Child, timing: Timing) -> dict[str, Any]:
    """Where the gateway's CPU goes under load: shares by part and by function."""
    found = scratch / f"{transport}.json"
    through = ("tests.bench.profile", str(found))
    async with gateway(transport, ports, scratch, core=cores()[0], through=through) as (child, port):
        child.signal(signal.SIGUSR1)
        await measure(Measured(child, generator, port), [], 64, timing)
    profile = json.loads(found.read_text())
    assert isinstance(profile, dict)
    return profile


# what is printed


def spread(points: list[Point], field: str, scale: float = 1.0) -> Spread:
    return Spread.of(getattr(point, field) * scale for point in points)


def show(points: Points) -> None:
    rows = [
        (
            f"{name} c={connections}",
            f"{spread(found, 'rps'):.0f}",
            f"{spread(found, 'p50_s', 1e3):.2f}",
            f"{spread(found, 'p99_s', 1e3):.2f}",
            f"{spread(found, 'cpu_s', 1e6):.0f}",
            f"{spread(found, 'others_cpu_s', 1e6).median:.0f}",
            sum(point.errors for point in found),
        )
        for (name, connections), found in points.items()
    ]
    table(("", "req/s", "p50 ms", "p99 ms", "CPU µs/req", "others' CPU", "errors"), rows)


def judge(report: Report, points: Points) -> None:
    for name in ("unary", "link"):
        throughput = ratio(points, name, 64, "rps")
        p50 = ratio(points, name, 1, "p50_s")
        cpu = ratio(points, name, 64, "cpu_s")
        report.figures[f"{name}_over_floor"] = {"throughput_c64": throughput, "p50_c1": p50, "cpu_c64": cpu}
        print(f"{name} over floor: throughput c=64 {throughput:.2f}, p50 c=1 {p50:.2f}, CPU c=64 {cpu:.2f}")
        report.goal(Goal(f"{name}_throughput_of_floor_c64", throughput.median, MIN_THROUGHPUT_RATIO))
        report.goal(Goal(f"{name}_p50_of_floor_c1", p50.median, MAX_P50_RATIO, "<="))
    stretch = ratio(points, "link", 64, "rps").median
    report.goal(Goal("link_throughput_of_floor_c64_stretch", stretch, STRETCH_THROUGHPUT_RATIO))


def ratio(points: Points, name: str, connections: int, field: str) -> Spread:
    over, under = points[name, connections], points["floor", connections]
    return ratios([getattr(point, field) for point in over], [getattr(point, field) for point in under])


def judge_hop(report: Report, points: Points) -> None:
    cpu_us = spread(points["link", 64], "cpu_s", 1e6).median
    report.goal(Goal("link_hop_cpu_us_c64", cpu_us, MAX_LINK_HOP_S * 1e6, "<="))


def show_shares(profiles: dict[str, dict[str, Any]], cpu_us: dict[str, float]) -> None:
    """The shares of a profiled run, as µs of the CPU time that was measured without a profiler."""
    parts = {name: profile["parts"] for name, profile in profiles.items()}
    order = sorted({part for one in parts.values() for part in one}, key=lambda part: -parts["link"].get(part, 0.0))
    rows = [(part, *[f"{one.get(part, 0.0) * cpu_us[name]:.0f}" for name, one in parts.items()]) for part in order]
    table(("CPU µs a request in the gateway, c=64", *parts), rows)


def plain(points: Points) -> dict[str, Any]:
    fields = ("rps", "p50_s", "p99_s", "cpu_s", "others_cpu_s")
    return {f"{name} c={c}": {one: spread(found, one) for one in fields} for (name, c), found in points.items()}


# the benchmark


async def bench(timing: Timing, *, profile: bool) -> Report:
    report = Report("gateway_overhead", {**vars(timing), "concurrency": CONCURRENCY, "targets": 3, "pinned": cores()})
    core, other_core = cores()
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        folder = scratch / "models" / workload.MODEL / "1"
        folder.mkdir(parents=True)
        (folder / "model.yaml").write_text(workload.MANIFEST)
        upstream = await stack.enter_async_context(
            Child("targets", "-m", "tests.bench.upstream_server", core=other_core)
        )
        generator = await stack.enter_async_context(Child("load", "-m", "tests.bench.load_generator", core=other_core))
        ports: list[int] = upstream.ready["ports"]

        hops = await measure_hops(ports[0], upstream, timing, core)
        print("one hop, no gateway around it")
        show(hops)
        judge_hop(report, hops)

        systems = await start_systems(stack, ports, scratch, generator, core)
        points = await measure_all(systems, [generator, upstream], timing)
        print("\nthrough the gateway and through the floor")
        show(points)
        judge(report, points)
        report.figures |= {"hop": plain(hops), "through": plain(points)}
        for system in systems.values():
            await system.child.__aexit__(None, None, None)
        if profile:
            found = {name: await profiled(name, ports, scratch, generator, timing) for name in ("link", "unary")}
            report.figures["profile"] = found
            print()
            show_shares(found, {name: spread(points[name, 64], "cpu_s", 1e6).median for name in found})
    return report


async def measure_hops(port: int, upstream: Child, timing: Timing, core: int | None) -> Points:
    async with AsyncExitStack() as stack:
        systems = {}
        for transport in ("unary", "link"):
            command = ("-m", "tests.bench.hop_client", transport, str(port))
            child = await stack.enter_async_context(Child(f"hop over {transport}", *command, core=core))
            systems[transport] = Measured(child, child, None)
        return await measure_all(systems, [upstream], timing)


async def start_systems(
    stack: AsyncExitStack, ports: list[int], scratch: Path, generator: Child, core: int | None
) -> dict[str, Measured]:
    port = free_port()
    command = ("-m", "tests.bench.floor_forwarder", f"127.0.0.1:{ports[0]}", str(port))
    systems = {"floor": Measured(await stack.enter_async_context(Child("floor", *command, core=core)), generator, port)}
    for transport in ("unary", "link"):
        child, port = await stack.enter_async_context(gateway(transport, ports, scratch, core=core))
        systems[transport] = Measured(child, generator, port)
    return systems


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--no-profile", action="store_true", help="leave out the run under a profiler")
    chosen = options.parse_args()
    quick = Timing(2, 0.5, 0.2) if chosen.quick else Timing(5, 3.0, 0.7)
    timing = Timing(chosen.repeats or quick.repeats, chosen.seconds or quick.seconds, quick.warmup_s)
    RESULTS.mkdir(exist_ok=True)
    asyncio.run(bench(timing, profile=not chosen.no_profile)).write()


if __name__ == "__main__":
    main()

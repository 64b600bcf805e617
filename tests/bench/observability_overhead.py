"""What it costs to be watched: one gateway process at the highest rate that it sustains, all of it on against all off.

    load generator ──HTTP──▶ gateway, everything on    ┐
                   ──HTTP──▶ gateway, nobody watches   ┴── link ──▶ three instant targets

On: metrics, scraped each second; the flight recorder and the console at their defaults; the access log with one line
in a hundred; traces at the default ratio, sent to a collector. Off: none of it, not even what no configuration can turn
off (`bare_gateway.py`). Both see the same load in turn, with a core to themselves, and 64 callers that ask again as
soon as they are answered: more than the process can take. The figure is its CPU time per request, on over off.

A third system, `counted`, has metrics and recorder alone, without console, scrapes, traces and log: where it goes.

    python -m tests.bench.observability_overhead [--quick] [--repeats 7] [--seconds 3]
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import aiohttp

from tests.bench import workload
from tests.bench.gateway_overhead import Measured, Point, Timing, gateway, measure, spread
from tests.bench.harness import Child, Goal, Report, cores, parser, ratios, table
from tests.support.observe.otlp import Otlp, collector
from tidegate import clock

AIM: Final = 1.10
CONNECTIONS: Final = 64
SCRAPE_S: Final = 1.0


async def scrape(address: str, sizes: list[int]) -> None:
    """As Prometheus does."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{address}/metrics", headers={"Accept": "application/openmetrics-text"}) as found:
                sizes.append(len(await found.read()))
            await clock.sleep(SCRAPE_S)


async def bench(timing: Timing) -> Report:
    report = Report("observability_overhead", {**vars(timing), "connections": CONNECTIONS, "pinned": cores()})
    core, other_core = cores()
    sizes: list[int] = []
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        folder = scratch / "models" / workload.MODEL / "1"
        folder.mkdir(parents=True)
        (folder / "model.yaml").write_text(workload.MANIFEST)
        child = Child("targets", "-m", "tests.bench.upstream_server", core=other_core)
        upstream = await stack.enter_async_context(child)
        generator = await stack.enter_async_context(Child("load", "-m", "tests.bench.load_generator", core=other_core))
        otlp: Otlp = await stack.enter_async_context(collector())
        watched = {
            "access_log": "text",
            "log_sample": 0.01,
            "log_level": "info",
            "tracing": {"endpoint": otlp.endpoint},
        }
        systems: dict[str, Measured] = {}
        for name, module, more in (
            ("off", "tests.bench.bare_gateway", {"console": False, "remember_decisions": 0}),
            ("counted", "gateway", {"console": False}),
            ("on", "gateway", watched),
        ):
            started = gateway("link", upstream.ready["ports"], scratch, core=core, name=name, module=module, **more)
            process, port = await stack.enter_async_context(started)
            systems[name] = Measured(process, generator, port)
        address = systems["on"].child.ready["addresses"]["metrics"]
        scraping = asyncio.create_task(scrape(address, sizes), name="scrapes")
        try:
            points = await in_turn(systems, [generator, upstream], timing)
        finally:
            scraping.cancel()
            await asyncio.gather(scraping, return_exceptions=True)
    judge(report, points)
    report.figures |= {"scrapes": len(sizes), "scrape_bytes": max(sizes, default=0), "spans": len(otlp.spans)}
    print(f"{len(sizes)} scrapes of {max(sizes, default=0)} bytes, {len(otlp.spans)} spans")
    return report


async def in_turn(systems: dict[str, Measured], others: list[Child], timing: Timing) -> dict[str, list[Point]]:
    """Each repeat measures all of them, every second one backwards."""
    points: dict[str, list[Point]] = {name: [] for name in systems}
    for repeat in range(timing.repeats):
        order = list(systems)
        for name in order if repeat % 2 == 0 else reversed(order):
            points[name].append(await measure(systems[name], others, CONNECTIONS, timing))
    return points


def judge(report: Report, points: dict[str, list[Point]]) -> None:
    rows = [
        (
            name,
            f"{spread(found, 'rps'):.0f}",
            f"{spread(found, 'p50_s', 1e3):.2f}",
            f"{spread(found, 'p99_s', 1e3):.2f}",
            f"{spread(found, 'cpu_s', 1e6):.0f}",
            sum(point.errors for point in found),
        )
        for name, found in points.items()
    ]
    table(("c=64", "req/s", "p50 ms", "p99 ms", "CPU µs/req", "errors"), rows)
    off = [point.cpu_s for point in points["off"]]
    for name in ("counted", "on"):
        over = ratios([point.cpu_s for point in points[name]], off)
        report.figures[f"{name}_over_off_cpu"] = over
        print(f"{name} over off: CPU {over:.3f}")
    fields = ("rps", "p50_s", "p99_s", "cpu_s")
    report.figures |= {f"{name}_{one}": spread(found, one) for name, found in points.items() for one in fields}
    over_off = ratios([point.cpu_s for point in points["on"]], off)
    report.goal(Goal("observability_cpu_of_off", over_off.median, AIM, "<="))


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    quick = Timing(3, 1.5, 0.5) if chosen.quick else Timing(7, 3.0, 0.7)
    timing = Timing(chosen.repeats or quick.repeats, chosen.seconds or quick.seconds, quick.warmup_s)
    asyncio.run(bench(timing)).write()


if __name__ == "__main__":
    main()

"""What the compiled wheel brings: the same gateway from the checkout and from the wheel, in turn, against the floor.

    load generator ──HTTP──▶ gateway over link, plain      ┐
                   ──HTTP──▶ gateway over link, compiled   ├──▶ three instant targets in a process of their own
                   ──HTTP──▶ gateway over unary, likewise  │
                   ──HTTP──▶ floor forwarder               ┘

Both kinds run on the interpreter and the libraries of `.venv-compiled`, where `make wheel-compiled test-compiled` has
installed the wheel; Python's `-P` alone says whether the checkout or the wheel is imported. The wheel must have been
built from this checkout. What a decision costs alone is measured the same way, as `decision_cost` measures it. CPU
time of the gateway's process is the figure that holds on a shared machine; ratios are taken within a repeat.

    python -m tests.bench.compiled_gain [--quick] [--repeats 5] [--seconds 3]
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from tests.bench import decision_cost, workload
from tests.bench.gateway_overhead import Measured, Points, Timing, gateway, measure_all, plain, ratio, show, spread
from tests.bench.harness import ROOT, Child, Goal, Report, Spread, cores, parser, ratios, table
from tidegate.testing.ports import free_port

INSTALLED: Final = ROOT / ".venv-compiled/bin/python"
KINDS: Final[dict[str, tuple[str, ...]]] = {"plain": (), "compiled": ("-P",)}
SIZES: Final = (8, 32)
_DECISIONS: Final = 4_000
MAX_CPU_RATIO: Final = 0.9
_PROBE: Final = "import gateway.core.placement.placer as one; print(one.__file__)"


def check_installed() -> None:
    """Ends with words where one kind would run the other's files."""
    for kind, flags in KINDS.items():
        command = [str(INSTALLED), *flags, "-c", _PROBE]
        try:
            found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            found = ""
        if found.endswith(".so") != (kind == "compiled"):
            raise SystemExit(f"{kind}: {found or 'nothing is installed'}; first: make test-compiled")


async def measure_decisions(repeats: int) -> dict[str, dict[int, list[float]]]:
    """Median CPU microseconds of a decision, by kind and number of targets; a list of repeats."""
    found: dict[str, dict[int, list[float]]] = {kind: {size: [] for size in SIZES} for kind in KINDS}
    for seed in range(repeats):
        for kind, flags in KINDS.items():
            command = (*flags, "-m", "tests.bench.compiled_gain", "--decide", str(seed))
            async with Child(f"decisions, {kind}", *command, core=cores()[0], python=INSTALLED) as child:
                for size in SIZES:
                    found[kind][size].append(child.ready[str(size)])
    return found


def decide(seed: int) -> None:
    """In a process of its own: prints the medians by number of targets."""
    cost = {size: decision_cost.measure(size, decision_cost.POLICIES["value"], _DECISIONS, seed).p50 for size in SIZES}
    print(json.dumps(cost), flush=True)


async def measure_gateways(timing: Timing) -> Points:
    core, other_core = cores()
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        folder = scratch / "models" / workload.MODEL / "1"
        folder.mkdir(parents=True)
        (folder / "model.yaml").write_text(workload.MANIFEST)

        async def child(name: str, *command: str, core: int | None) -> Child:
            return await stack.enter_async_context(Child(name, *command, core=core, python=INSTALLED))

        upstream = await child("targets", "-m", "tests.bench.upstream_server", core=other_core)
        generator = await child("load", "-m", "tests.bench.load_generator", core=other_core)
        ports: list[int] = upstream.ready["ports"]
        port = free_port()
        words = ("-m", "tests.bench.floor_forwarder", f"127.0.0.1:{ports[0]}", str(port))
        systems = {"floor": Measured(await child("floor", *words, core=core), generator, port)}
        for transport in ("link", "unary"):
            for kind, flags in KINDS.items():
                name = f"{transport} {kind}"
                started = gateway(
                    transport, ports, scratch, core=core, name=name.replace(" ", "-"), python=INSTALLED, flags=flags
                )
                measured, at = await stack.enter_async_context(started)
                systems[name] = Measured(measured, generator, at)
        return await measure_all(systems, [generator, upstream], timing)


def judge(report: Report, points: Points, decisions: dict[str, dict[int, list[float]]]) -> None:
    for transport in ("link", "unary"):
        over: dict[str, Any] = {}
        for figure, connections, field in (
            ("cpu_c64", 64, "cpu_s"),
            ("throughput_c64", 64, "rps"),
            ("p50_c1", 1, "p50_s"),
        ):
            pair = [[getattr(one, field) for one in points[f"{transport} {kind}", connections]] for kind in KINDS]
            over[figure] = ratios(pair[1], pair[0])
            print(f"{transport}, compiled over plain: {figure} {over[figure]:.2f}")
        report.figures[f"{transport}_compiled_over_plain"] = over
        for kind in KINDS:
            name = f"{transport} {kind}"
            report.figures[f"{transport}_{kind}"] = {
                "cpu_us_c64": spread(points[name, 64], "cpu_s", 1e6),
                "cpu_over_floor_c64": ratio(points, name, 64, "cpu_s"),
                "throughput_over_floor_c64": ratio(points, name, 64, "rps"),
                "p50_over_floor_c1": ratio(points, name, 1, "p50_s"),
            }
        report.goal(Goal(f"{transport}_cpu_compiled_over_plain_c64", over["cpu_c64"].median, MAX_CPU_RATIO, "<="))
    report.figures["decide_us"] = {
        f"{kind}_{size}_targets": Spread.of(found)
        for kind, by_size in decisions.items()
        for size, found in by_size.items()
    }


async def bench(timing: Timing) -> Report:
    report = Report("compiled_gain", {**vars(timing), "targets": 3, "pinned": cores(), "sizes": SIZES})
    decisions = await measure_decisions(timing.repeats)
    table(
        ("µs of CPU a decision", *KINDS),
        [(f"{size} targets", *(f"{Spread.of(decisions[kind][size]):.0f}" for kind in KINDS)) for size in SIZES],
    )
    points = await measure_gateways(timing)
    show(points)
    judge(report, points, decisions)
    report.figures |= {"through": plain(points)}
    return report


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--decide", type=int, metavar="SEED", help="used by the bench itself")
    chosen = options.parse_args()
    if chosen.decide is not None:
        decide(chosen.decide)
        sys.stdin.read()
        return
    check_installed()
    quick = Timing(3, 0.5, 0.2) if chosen.quick else Timing(5, 3.0, 0.7)
    timing = Timing(chosen.repeats or quick.repeats, chosen.seconds or quick.seconds, quick.warmup_s)
    asyncio.run(bench(timing)).write()


if __name__ == "__main__":
    main()

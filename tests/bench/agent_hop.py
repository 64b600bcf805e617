"""What an edge agent costs a request: a closed loop against an instant model, beside a bare echo of the same frames.

    hop client ──one link stream──▶ edge agent ──▶ its worker, whose model takes 50 µs (`engine: paced`)
               ──the same─────────▶ echo (`link_echo.py`): parses and answers, and serves nothing

A model that takes hardly any time leaves what the agent itself takes: frames, checks, the queue, the way to the worker
and back. A small board takes some six times as long for it as a server does, which is then as long as its model. Both
sides see the same requests from the same client in the same run, in turn within each repeat. All processes of the agent
share one core, as on the least of boards; echo and agent are on it in turn, and the client has the other. CPU a request
is that of all the agent's processes with all their threads; rates on a busy machine mean little, CPU means much.

`added` is the median latency of one caller, less that of the echo and less the model's 50 µs.

What it takes beside requests is measured of an agent with a broker, as a device has one, without a model (it waits for
a rollout, as devices do that come without one) and with int8 MiniLM: memory when it is ready, resident (RSS) and
proportional (PSS, which counts what processes share once), summed over its processes; and the share of a core at rest,
alone and with a gateway's link open.

    python -m tests.bench.agent_hop [--quick] [--repeats 5] [--seconds 3] [--only hop|rest]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.bench import workload
from tests.bench.gateway_overhead import Timing
from tests.bench.harness import Child, Goal, Report, Spread, cores, parser, ratios, table
from tests.support.mqtt.brokers import MOSQUITTO, Embedded, Mosquitto
from tidegate import clock
from tidegate.security.attestation.keys import line_of, make_key
from tidegate.tools.build.demo.paced import PacedCosts, PacedNoise, add_paced

MODELS: Final = Path(__file__).parents[2] / ".tidegate" / "models"
CONCURRENCY: Final = (1, 8, 32)
MODEL_S: Final = 50e-6
MOST_STALLS: Final = 5
MAX_CPU_US: Final = 300.0  # of all its processes, at one
MAX_P50_ADDED_S: Final = 0.45e-3
MAX_EMPTY_MB: Final = 120.0
MAX_MINILM_MB: Final = 200.0
MAX_REST_RATIO: Final = 0.001


@dataclass(frozen=True)
class Point:
    """One measurement. CPU is per request: of the agent (or the echo) and of its worker."""

    rps: float
    p50_s: float
    p99_s: float
    agent_cpu_s: float
    worker_cpu_s: float

    @property
    def cpu_s(self) -> float:
        return self.agent_cpu_s + self.worker_cpu_s


@dataclass(frozen=True)
class Running:
    """A process under measurement and its children."""

    pid: int
    address: str

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.pid)
        return [own, *own.children(recursive=True)]

    def cpu_s(self) -> tuple[float, float]:
        """Its own and its children's."""
        own, *children = [_cpu_s(one.pid) for one in self.processes()]
        return own, sum(children)

    def megabytes(self) -> tuple[float, float]:
        """Resident and proportional, all processes together."""
        found = [one.memory_full_info() for one in self.processes()]
        return sum(one.rss for one in found) / 1e6, sum(one.pss for one in found) / 1e6


def _cpu_s(pid: int) -> float:
    """CPU seconds of all threads by the scheduler's clock: the usual one counts in hundredths of a second."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


# requests

Points = dict[tuple[str, int], list[Point]]  # by system and concurrency


async def measure(system: Running, client: Child, connections: int, timing: Timing) -> Point | None:
    """None where a stream stood still all the time, which one that waits for a core does on a busy machine."""
    await client.command(connections=connections, warmup_s=timing.warmup_s, seconds=timing.seconds)
    await client.line()
    before = system.cpu_s()
    found = await client.line()
    agent_s, worker_s = (now - then for now, then in zip(system.cpu_s(), before, strict=True))
    if not (requests := found["requests"]):
        print(
            f"no answer in {timing.seconds:g} s at {connections} at once; measured again", file=sys.stderr, flush=True
        )
        return None
    return Point(
        rps=requests / found["elapsed_s"],
        p50_s=found["p50_s"],
        p99_s=found["p99_s"],
        agent_cpu_s=agent_s / requests,
        worker_cpu_s=worker_s / requests,
    )


async def measure_again(system: Running, client: Child, connections: int, timing: Timing) -> tuple[Point, int]:
    """A measurement, and how many before it found nothing."""
    for stalls in range(MOST_STALLS):
        if (point := await measure(system, client, connections, timing)) is not None:
            return point, stalls
    raise RuntimeError(f"{MOST_STALLS} measurements one after another without an answer, at {connections} at once")


async def measure_all(systems: dict[str, tuple[Running, Child]], timing: Timing) -> tuple[Points, int]:
    """Every system at every concurrency, in turn, `repeats` times; every second repeat backwards."""
    order = [(name, c) for c in CONCURRENCY for name in systems]
    points: Points = {key: [] for key in order}
    stalls = 0
    for repeat in range(timing.repeats):
        for name, connections in order if repeat % 2 == 0 else reversed(order):
            point, in_vain = await measure_again(*systems[name], connections, timing)
            points[name, connections].append(point)
            stalls += in_vain
        print(f"repeat {repeat + 1} of {timing.repeats} done", file=sys.stderr, flush=True)
    return points, stalls


@asynccontextmanager
async def agent(
    folder: Path, repository: Path, *, core: int | None = None, through: tuple[str, ...] = (), **more: Any
) -> AsyncIterator[Running]:
    """A real agent, ready. `more` is configuration; `through`: a module with its words that runs the process's."""
    config = _config(folder, {"model_repository": str(repository), **more})
    command = ("-P", "-m", *through, "edge_agent", "--config", str(config))
    async with Child("agent", *command, core=core, log=folder / "edge.log") as child:
        while child.ready["event"] != "ready":
            child.ready = await child.line()
        yield _running(child)


def _config(folder: Path, more: dict[str, Any]) -> Path:
    folder.mkdir()
    words = {"name": "bench", "grpc_port": 0, "http_port": 0, "log_level": "error", "state_dir": str(folder / "state")}
    path = folder / "edge.yaml"
    path.write_text(yaml.safe_dump({**words, **more}))
    return path


def _running(child: Child) -> Running:
    return Running(child.pid, child.ready["addresses"]["grpc"])


def hop_client(address: str, core: int | None) -> Child:
    return Child("client", "-m", "tests.bench.hop_client", "link", address.rpartition(":")[2], core=core)


async def measure_hop(scratch: Path, timing: Timing) -> tuple[Points, int]:
    core, other_core = cores()
    models = scratch / "paced"
    costs = PacedCosts(edge_ms=((1.0, 1e3 * MODEL_S), (8192.0, 1e3 * MODEL_S)))
    add_paced(workload.MODEL, costs, models, noise=PacedNoise(edge=0.0))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        echo = _running(await enter(Child("echo", "-m", "tests.bench.link_echo", core=core)))
        served = await enter(agent(scratch / "hop", models, core=core))
        systems = {
            name: (system, await enter(hop_client(system.address, other_core)))
            for name, system in (("echo", echo), ("agent", served))
        }
        return await measure_all(systems, timing)


# at rest


async def rest_ratio(running: Running, rest_s: float) -> float:
    """The share of a core that all its processes take."""
    before = sum(running.cpu_s())
    await clock.sleep(rest_s)
    return (sum(running.cpu_s()) - before) / rest_s


async def measure_rest(scratch: Path, broker: str, repeats: int, rest_s: float) -> dict[str, list[float]]:
    trusted = scratch / "signing.pub"
    trusted.write_text(line_of(make_key(scratch / "signing.key"), "bench") + "\n")
    kinds: dict[str, tuple[Path, dict[str, Any]]] = {"empty": (scratch / "none", {"rollout": {"keys": [str(trusted)]}})}
    if (MODELS / "minilm").is_dir():
        kinds["minilm"] = MODELS, {"models": ["minilm"]}
    found: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for name, (repository, more) in kinds.items():
            async with agent(scratch / f"{name}-{repeat}", repository, mqtt=broker, **more) as running:
                await clock.sleep(1.0)  # what follows a start: births, a first look at links
                rss_mb, pss_mb = running.megabytes()
                figures = {"rss_mb": rss_mb, "pss_mb": pss_mb, "rest_ratio": await rest_ratio(running, rest_s)}
                async with hop_client(running.address, None):
                    await clock.sleep(1.0)
                    figures["linked_rest_ratio"] = await rest_ratio(running, rest_s)
            for figure, value in figures.items():
                found.setdefault(f"{name}_{figure}", []).append(value)
    return found


# what is printed


def spread(points: list[Point], field: str, scale: float = 1.0) -> Spread:
    return Spread.of(getattr(point, field) * scale for point in points)


def over_echo(points: Points, connections: int, field: str) -> Spread:
    served, echo = points["agent", connections], points["echo", connections]
    return ratios([getattr(point, field) for point in served], [getattr(point, field) for point in echo])


def p50_added_s(points: Points) -> Spread:
    """What one caller waits beyond the echo's answer and the model's own time, repeat by repeat."""
    pairs = zip(points["agent", 1], points["echo", 1], strict=True)
    return Spread.of(served.p50_s - echo.p50_s - MODEL_S for served, echo in pairs)


def show(points: Points) -> None:
    rows = [
        (
            f"{name} c={connections}",
            f"{spread(found, 'rps'):.0f}",
            f"{spread(found, 'p50_s', 1e3):.2f}",
            f"{spread(found, 'cpu_s', 1e6):.0f}",
            f"{spread(found, 'worker_cpu_s', 1e6).median:.0f}" if name == "agent" else "-",
            f"{over_echo(points, connections, 'cpu_s').median:.2f}" if name == "agent" else "",
        )
        for (name, connections), found in points.items()
    ]
    table(("", "req/s", "p50 ms", "CPU µs/req", "worker's", "CPU/echo"), rows)


def judge_hop(report: Report, points: Points) -> None:
    added, cpu_us = p50_added_s(points), spread(points["agent", 1], "cpu_s", 1e6).median
    fields = ("rps", "p50_s", "p99_s", "cpu_s", "agent_cpu_s", "worker_cpu_s")
    report.figures |= {f"{name} c={c}": {one: spread(of, one) for one in fields} for (name, c), of in points.items()}
    report.figures["over_echo"] = {
        f"c={c}": {field: over_echo(points, c, field) for field in ("rps", "p50_s", "cpu_s")} for c in CONCURRENCY
    }
    report.figures["p50_added_s_c1"] = added
    report.goal(Goal("agent_cpu_us_c1", cpu_us, MAX_CPU_US, "<="))
    report.goal(Goal("agent_p50_added_ms_c1", added.median * 1e3, MAX_P50_ADDED_S * 1e3, "<="))


def judge_rest(report: Report, found: dict[str, list[float]]) -> None:
    spreads = {name: Spread.of(samples) for name, samples in found.items()}
    table(("at rest", "median (lowest..highest)"), [(name, f"{one:.4f}") for name, one in spreads.items()])
    report.figures["rest"] = spreads
    report.goal(Goal("agent_empty_rss_mb", spreads["empty_rss_mb"].median, MAX_EMPTY_MB, "<="))
    if (minilm := spreads.get("minilm_rss_mb")) is not None:
        report.goal(Goal("agent_minilm_rss_mb", minilm.median, MAX_MINILM_MB, "<="))
    else:
        report.goal(Goal("agent_minilm_rss_mb", None, MAX_MINILM_MB, "<=", f"there is no {MODELS}: `make run`"))
    for name in ("empty_rest_ratio", "empty_linked_rest_ratio"):
        report.goal(Goal(f"agent_{name}", spreads[name].median, MAX_REST_RATIO, "<="))


# the benchmark


async def bench(timing: Timing, rest_s: float, only: str | None) -> Report:
    words = {"concurrency": CONCURRENCY, "model_s": MODEL_S, "rest_s": rest_s, "pinned": cores()}
    report = Report("agent_hop", {**vars(timing), **words})
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name:
        scratch = Path(name)
        if only != "rest":
            points, stalls = await measure_hop(scratch, timing)
            report.figures["measurements_without_an_answer"] = stalls
            show(points)
            judge_hop(report, points)
        if only != "hop":
            (scratch / "broker").mkdir()
            kind = Mosquitto if MOSQUITTO else Embedded
            with kind(scratch / "broker") as broker:
                judge_rest(report, await measure_rest(scratch, broker.url, 3 if timing.repeats > 2 else 1, rest_s))
    return report


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--only", choices=("hop", "rest"), help="one half instead of both")
    chosen = options.parse_args()
    quick = Timing(2, 0.7, 0.3) if chosen.quick else Timing(5, 3.0, 0.7)
    timing = Timing(chosen.repeats or quick.repeats, chosen.seconds or quick.seconds, quick.warmup_s)
    asyncio.run(bench(timing, 4.0 if chosen.quick else 20.0, chosen.only)).write()


if __name__ == "__main__":
    main()

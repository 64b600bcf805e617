"""What the way to a generating engine costs its tokens: gateway, link and pool around it, against the engine alone.

    engine     the engine stepped in a loop, with nothing around it                     generate_engine.py
    gateway    streamed completions by HTTP through gateway, link, pool and worker      token_callers.py
    echo       one at a time, from a bare aiohttp server that sends tokens by the clock     token_echo.py

All are asked for the same, in turn within each repeat, and what is taken is when each token came. The engine's loop
never rests. The others do, between one answer's first token and the next one's, and a process that has rested is slow:
the echo's first token says how slow where nothing else is done. The engine is paced (`engine: paced`): it takes as long
as a model would, step by step, and computes nothing, so that on a few cores it is the way that is measured and not the
model. 500 streams ask for more tokens than one gateway's core can pass on; what its CPU takes for a token is taken
there. Memory is that of the gateway's process with 500 streams under way, over that with one, each stream with the
tokens that it was sent.

    python -m tests.bench.generate_overhead [--quick] [--repeats 5] [--seconds 5]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import yaml
from msgspec.structs import replace

from tests.bench.gateway_overhead import Timing
from tests.bench.harness import Child, Goal, Report, Spread, cores, parser, ratios, table
from tests.support.models.generative import COST
from tests.support.models.text_side import text_side_folder
from tests.support.paced_generation import write_pace
from tidegate.models.digest import sha256_of
from tidegate.models.repository import save_manifest

MODEL: Final = "talker"
STREAMS: Final = (1, 64, 500)
SLOTS: Final = 512
PROMPT, TOKENS = 32, 128
PREFILL_MS: Final = 0.01  # a token: 500 prompts take 160 ms of the engine, and their tokens 2.6 s
# A step of one, of 64 and of 500 sequences: the last makes 25,000 tokens a second, more than is aimed at.
STEP_MS: Final = ((1.0, 10.0), (64.0, 12.0), (512.0, 20.0))
MAX_FIRST_ADDED_MS: Final = {"p50": 3.0, "p99": 10.0}
MAX_BETWEEN_ADDED_MS: Final = {"p50": 0.3, "p99": 2.0}
MIN_THROUGHPUT: Final = 0.97
MIN_TOKENS_A_CORE: Final = 20_000.0
MAX_CPU_US: Final = 30.0
MAX_STREAM_KIB: Final = 16.0


@dataclass(frozen=True)
class Point:
    """One measurement. CPU is the gateway's, per token; memory its process's."""

    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    between_p50_s: float
    between_p99_s: float
    cpu_s: float
    memory: float
    errors: int


Points = dict[tuple[str, int], list[Point]]  # by system and streams


async def measure(child: Child, streams: int, timing: Timing, gateway: Child | None, **words: Any) -> Point:
    await child.command(
        streams=streams, prompt=PROMPT, tokens=TOKENS, warmup_s=timing.warmup_s, seconds=timing.seconds, **words
    )
    await child.line()
    cpu_before = 0.0 if gateway is None else gateway.cpu_s()
    found = await child.line()
    cpu_s = 0.0 if gateway is None else gateway.cpu_s() - cpu_before
    if found.get("fault"):
        print(f"{streams} streams: {found['fault']}", file=sys.stderr, flush=True)
    memory = 0 if gateway is None else psutil.Process(gateway.pid).memory_info().rss
    return Point(
        tokens_per_s=found["tokens_per_s"],
        first_p50_s=found["first_p50_s"],
        first_p99_s=found["first_p99_s"],
        between_p50_s=found["between_p50_s"],
        between_p99_s=found["between_p99_s"],
        cpu_s=cpu_s / max(1, found["tokens"]),
        memory=memory,
        errors=max(found["errors"], bool(found.get("fault"))),  # a fault of the warm-up has left callers out
    )


def write_model(models: Path) -> Path:
    """The paced model with a text side; its artefact."""
    folder = models / MODEL / "1"
    folder.mkdir(parents=True)
    manifest = text_side_folder(folder)
    assert manifest.generative is not None
    artefact = write_pace(
        folder, step_ms=STEP_MS, slots=SLOTS, prefill_ms=PREFILL_MS, prefill_chunk=4096, context=512, ids=(3, 90)
    )
    cost = replace(
        COST,
        prefill_ms=PREFILL_MS,
        step_ms=tuple((int(batch), ms) for batch, ms in STEP_MS),
        cache_bytes=1024,
        slots=SLOTS,
    )
    variant = replace(
        manifest.variants[0],
        artefact=artefact.name,
        sha256=sha256_of(artefact),
        size_bytes=artefact.stat().st_size,
        generation=cost,
    )
    save_manifest(folder, replace(manifest, variants=(variant,)))
    return artefact


async def start_pool(stack: AsyncExitStack, scratch: Path, core: int | None, through: Sequence[str] = ()) -> Child:
    config = scratch / "pool.yaml"
    words = {"name": "bench", "grpc_port": 0, "model_repository": str(scratch / "models"), "device": "cpu"}
    config.write_text(yaml.safe_dump({**words, "log_level": "error", "warmup_budget_s": 1.0}))
    child = await stack.enter_async_context(
        Child("pool", "-m", *through, "cloud_pool", "--config", str(config), core=core, log=scratch / "pool.log")
    )
    while child.ready["event"] != "ready":
        child.ready = await child.line()
    return child


async def start_gateway(
    stack: AsyncExitStack, scratch: Path, pool: Child, core: int | None, through: Sequence[str] = ()
) -> tuple[Child, int]:
    """Args: through: a module with its arguments that runs the gateway's."""
    config = scratch / "gateway.yaml"
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
    targets = [{"name": "pool", "tier": "pool", "address": pool.ready["addresses"]["grpc"]}]
    words = {"name": "bench", "model_repository": str(scratch / "models"), "log_level": "error", "targets": targets}
    # A gateway learns with the answers how many a pool takes, and a caller that is refused before asks no more.
    config.write_text(yaml.safe_dump({**words, **ports, "adaptive_limit": False}))
    child = await stack.enter_async_context(
        Child("gateway", "-m", *through, "gateway", "--config", str(config), core=core, log=scratch / "gateway.log")
    )
    return child, int(child.ready["addresses"]["http"].rpartition(":")[2])


def spread(points: list[Point], field: str, scale: float = 1.0) -> Spread:
    return Spread.of(getattr(point, field) * scale for point in points)


def added_ms(points: Points, streams: int, field: str) -> Spread:
    pairs = zip(points["gateway", streams], points["engine", streams], strict=True)
    return Spread.of(1e3 * (getattr(over, field) - getattr(alone, field)) for over, alone in pairs)


def show(points: Points) -> None:
    rows = [
        (
            f"{name} c={streams}",
            f"{spread(found, 'tokens_per_s'):.0f}",
            f"{spread(found, 'first_p50_s', 1e3):.1f}",
            f"{spread(found, 'first_p99_s', 1e3).median:.1f}",
            f"{spread(found, 'between_p50_s', 1e3):.2f}",
            f"{spread(found, 'between_p99_s', 1e3).median:.2f}",
            f"{spread(found, 'cpu_s', 1e6):.1f}" if name == "gateway" else "",
            sum(point.errors for point in found),
        )
        for (name, streams), found in points.items()
    ]
    table(("", "tokens/s", "first p50 ms", "p99", "between p50 ms", "p99", "CPU µs/token", "errors"), rows)


def judge(report: Report, points: Points) -> None:
    figures: dict[str, Any] = {}
    for mark, aim in MAX_FIRST_ADDED_MS.items():
        figures[f"first_added_{mark}_ms_c1"] = added_ms(points, 1, f"first_{mark}_s")
        report.goal(Goal(f"first_token_added_{mark}_ms", figures[f"first_added_{mark}_ms_c1"].median, aim, "<="))
    figures["echo_first_p50_ms_c1"] = spread(points["echo", 1], "first_p50_s", 1e3)
    for mark, aim in MAX_BETWEEN_ADDED_MS.items():
        figures[f"between_added_{mark}_ms_c1"] = added_ms(points, 1, f"between_{mark}_s")
        report.goal(Goal(f"between_tokens_added_{mark}_ms", figures[f"between_added_{mark}_ms_c1"].median, aim, "<="))
    through = [one.tokens_per_s for one in points["gateway", 64]]
    figures["throughput_c64"] = ratios(through, [one.tokens_per_s for one in points["engine", 64]])
    report.goal(Goal("throughput_of_engine_c64", figures["throughput_c64"].median, MIN_THROUGHPUT))
    figures["tokens_per_s_c500"] = spread(points["gateway", 500], "tokens_per_s")
    report.goal(Goal("tokens_per_s_of_a_core_c500", figures["tokens_per_s_c500"].median, MIN_TOKENS_A_CORE))
    figures["cpu_us_a_token_c500"] = spread(points["gateway", 500], "cpu_s", 1e6)
    report.goal(Goal("cpu_us_a_token_c500", figures["cpu_us_a_token_c500"].median, MAX_CPU_US, "<="))
    pairs = zip(points["gateway", 500], points["gateway", 1], strict=True)
    figures["stream_kib"] = Spread.of((many.memory - one.memory) / 499 / 1024 for many, one in pairs)
    report.goal(Goal("memory_a_stream_kib", figures["stream_kib"].samples[0], MAX_STREAM_KIB, "<="))
    figures["errors"] = sum(one.errors for found in points.values() for one in found)
    report.goal(Goal("errors", figures["errors"], 0, "<="))
    report.figures |= figures


async def bench(timing: Timing) -> Report:
    report = Report("generate_overhead", {**vars(timing), "streams": STREAMS, "step_ms": STEP_MS, "pinned": cores()})
    core, other_core = cores()
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        artefact = write_model(scratch / "models")
        words = ("-m", "tests.bench.generate_engine", "paced", str(artefact), str(SLOTS))
        engine = await stack.enter_async_context(Child("engine", *words, core=other_core))
        pool = await start_pool(stack, scratch, other_core)
        gateway, port = await start_gateway(stack, scratch, pool, core)
        callers = await stack.enter_async_context(
            Child("callers", "-m", "tests.bench.token_callers", MODEL, core=other_core)
        )
        echo = await stack.enter_async_context(
            Child("echo", "-m", "tests.bench.token_echo", str(PROMPT * PREFILL_MS), str(STEP_MS[0][1]), core=core)
        )
        ports = {"gateway": port, "echo": int(echo.ready["port"])}
        points: Points = {(name, streams): [] for streams in STREAMS for name in ("engine", "gateway")}
        points["echo", 1] = []
        for repeat in range(timing.repeats):
            for name, streams in points:
                alone = name == "engine"
                point = await measure(
                    engine if alone else callers,
                    streams,
                    timing,
                    gateway if name == "gateway" else None,
                    **({} if alone else {"port": ports[name]}),
                )
                points[name, streams].append(point)
            print(f"repeat {repeat + 1} of {timing.repeats} done", file=sys.stderr, flush=True)
    show(points)
    judge(report, points)
    fields = ("tokens_per_s", "first_p50_s", "first_p99_s", "between_p50_s", "between_p99_s", "cpu_s")
    report.figures |= {
        f"{name} c={streams}": {one: spread(found, one) for one in fields} for (name, streams), found in points.items()
    }
    return report


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    quick = Timing(1, 2.0, 2.0) if chosen.quick else Timing(5, 5.0, 2.5)
    timing = Timing(chosen.repeats or quick.repeats, chosen.seconds or quick.seconds, quick.warmup_s)
    asyncio.run(bench(timing)).write()


if __name__ == "__main__":
    main()

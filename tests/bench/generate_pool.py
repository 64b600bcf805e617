"""Real engines in their places, against the same engines driven bare; and what continuous batching gives.

    bare      the engine stepped in a loop with so many sequences, nothing around it             generate_engine.py
    served    streamed completions by HTTP through gateway, link and the pool's, or edge's, host   token_callers.py

The model is the demo's small language model: in the pool bf16 by transformers' continuous batching, on the edge int4
by onnxruntime-genai, each with one compute thread. The engine has one core to itself and all else shares the other, as
far as there are two. Both are asked for the same, in turn within each repeat; with more streams than the engine has
slots the bare engine has as many as it has slots.

    python -m tests.bench.generate_pool [--quick] [--repeats 3] [--seconds 20] [--repository FOLDER]
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.bench.gateway_overhead import Timing
from tests.bench.harness import Child, Goal, Report, Spread, cores, parser, ratios, table
from tests.support.models.demo_models import generating_repository
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import Repository

MODEL: Final = "smollm2"
PROMPT, TOKENS = 32, 48
STREAMS: Final = {"pool": (1, 8, 32), "edge": (1, 4)}
MIN_OF_BARE: Final = 0.95
MIN_BATCHING: Final = 3.0  # transformers on one thread gave about as much when it was tried alone


@dataclass(frozen=True)
class Rate:
    """One measurement."""

    tokens_per_s: float
    first_p50_s: float
    errors: int


Rates = dict[tuple[str, str, int], list[Rate]]  # by tier, system and streams


async def measure(child: Child, streams: int, timing: Timing, **words: Any) -> Rate:
    await child.command(
        streams=streams, prompt=PROMPT, tokens=TOKENS, warmup_s=timing.warmup_s, seconds=timing.seconds, **words
    )
    await child.line()
    found = await child.line()
    if found.get("fault"):
        print(found["fault"], file=sys.stderr, flush=True)
    return Rate(found["tokens_per_s"], found["first_p50_s"], found["errors"])


def variant_of(manifest: Manifest, tier: str) -> Variant:
    return next(one for one in manifest.variants if tier in one.where)


async def start_bare(
    stack: AsyncExitStack, repository: Path, variant: Variant, core: int | None, device: str = "cpu"
) -> Child:
    assert variant.generation is not None
    artefact, slots = repository / MODEL / "1" / variant.artefact, str(variant.generation.slots)
    words = ("-m", "tests.bench.generate_engine", variant.engine, str(artefact), slots, "1", device)
    return await stack.enter_async_context(Child(f"bare {variant.engine}", *words, core=core))


async def start_served(
    stack: AsyncExitStack,
    scratch: Path,
    repository: Path,
    tier: str,
    core: int | None,
    other: int | None,
    device: str = "cpu",
) -> int:
    """A gateway before one target of the tier, whose worker has a core to itself; the gateway's HTTP port."""
    common = {"model_repository": str(repository), "log_level": "error", "grpc_port": 0}
    own = {"pool": {"device": device}, "edge": {"http_port": None, "state_dir": str(scratch / "state"), "threads": 1}}
    config = scratch / f"{tier}.yaml"
    config.write_text(yaml.safe_dump({"name": "bench", **common, **own[tier]}))
    module = "cloud_pool" if tier == "pool" else "edge_agent"
    target = Child(tier, "-m", module, "--config", str(config), core=other, log=scratch / f"{tier}.log")
    await stack.enter_async_context(target)
    while target.ready["event"] != "ready":
        target.ready = await target.line()
    for worker in psutil.Process(target.pid).children():
        for thread in worker.threads() if core is not None else ():
            os.sched_setaffinity(thread.id, {core})
    targets = [{"name": tier, "tier": tier, "address": target.ready["addresses"]["grpc"]}]
    words = {"name": "bench", "http_port": 0, "metrics_port": 0, "admin_port": 0, "targets": targets, **common}
    (scratch / f"gateway-{tier}.yaml").write_text(yaml.safe_dump(words))
    gateway = Child(
        f"gateway of the {tier}",
        *("-m", "gateway", "--config", str(scratch / f"gateway-{tier}.yaml")),
        core=other,
        log=scratch / f"gateway-{tier}.log",
    )
    await stack.enter_async_context(gateway)
    return int(gateway.ready["addresses"]["http"].rpartition(":")[2])


async def measure_tier(repository: Path, manifest: Manifest, tier: str, timing: Timing) -> Rates:
    core, other = cores()
    variant = variant_of(manifest, tier)
    assert variant.generation is not None
    slots = variant.generation.slots
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        bare = await start_bare(stack, repository, variant, core)
        port = await start_served(stack, scratch, repository, tier, core, other)
        callers = await stack.enter_async_context(
            Child("callers", "-m", "tests.bench.token_callers", MODEL, core=other)
        )
        rates: Rates = {(tier, name, streams): [] for streams in STREAMS[tier] for name in ("bare", "served")}
        for repeat in range(timing.repeats):
            for _, name, streams in rates:
                at_once = min(streams, slots) if name == "bare" else streams
                words = {} if name == "bare" else {"port": port}
                child = bare if name == "bare" else callers
                rates[tier, name, streams].append(await measure(child, at_once, timing, **words))
            print(f"{tier}: repeat {repeat + 1} of {timing.repeats} done", file=sys.stderr, flush=True)
    return rates


def per_s(rates: Rates, tier: str, name: str, streams: int) -> list[float]:
    return [one.tokens_per_s for one in rates[tier, name, streams]]


def judge(report: Report, rates: Rates) -> None:
    for tier, sizes in STREAMS.items():
        for streams in sizes:
            ratio = ratios(per_s(rates, tier, "served", streams), per_s(rates, tier, "bare", streams))
            report.figures[f"{tier}_of_bare_c{streams}"] = ratio
            report.goal(Goal(f"{tier}_of_bare_c{streams}", ratio.median, MIN_OF_BARE))
    batching = ratios(per_s(rates, "pool", "served", 32), per_s(rates, "pool", "served", 1))
    report.figures["batching_gain_c32"] = batching
    report.goal(Goal("batching_gain_c32", batching.median, MIN_BATCHING))
    report.figures["errors"] = sum(one.errors for found in rates.values() for one in found)
    report.goal(Goal("errors", report.figures["errors"], 0, "<="))


async def bench(timing: Timing, repository: Path) -> Report:
    report = Report("generate_pool", {**vars(timing), "streams": STREAMS, "pinned": cores()})
    manifest = next(one for one in Repository(repository).manifests() if one.name == MODEL)
    rates: Rates = {}
    for tier in STREAMS:
        rates |= await measure_tier(repository, manifest, tier, timing)
    rows = [
        (
            f"{tier} {name} c={streams}",
            f"{Spread.of(one.tokens_per_s for one in found):.1f}",
            f"{1e3 * Spread.of(one.first_p50_s for one in found).median:.0f}",
            sum(one.errors for one in found),
        )
        for (tier, name, streams), found in rates.items()
    ]
    table(("", "tokens/s", "first p50 ms", "errors"), rows)
    judge(report, rates)
    return report


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--repository", type=Path, help="one that holds smollm2; else it is built")
    chosen = options.parse_args()
    quick = Timing(1, 4.0, 3.0) if chosen.quick else Timing(3, 20.0, 6.0)
    timing = Timing(chosen.repeats or quick.repeats, chosen.seconds or quick.seconds, quick.warmup_s)
    asyncio.run(bench(timing, chosen.repository or generating_repository().root)).write()


if __name__ == "__main__":
    main()

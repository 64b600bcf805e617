"""The pool around a GPU: texts a second behind its link, of one worker and of two, against its own engine alone.

One text a request is what a gateway sends; sixteen are what a client sends that has many. One core of Python serves
the link, so with one text a request the server is the limit before the GPU is: its CPU time a request is told beside.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from tests.bench.batching.servers import Pool
from tests.bench.gpu.networks import MOST_ROWS, Network, draw_rows, packed
from tests.bench.harness import Child, Goal, Report, Spread, table

ROWS: Final = 1024
LOADS: Final = ((1, 1), (64, 1), (256, 1), (64, 16))  # callers, and texts of each request
WORKERS: Final = (1, 2)
LEAST_OF_BARE: Final = 0.9


async def measure(report: Report, network: Network, seconds: float, repeats: int) -> None:
    bare = _bare(network, repeats)
    report.figures[f"{network.size.name}.bare_rows_per_s"] = bare
    found: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for workers in WORKERS:
        async with AsyncExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
            repository, words = network.folder.parents[1], {"precision": "bf16", "workers": workers}
            pool = stack.enter_context(Pool(f"gpu{workers}", repository, scratch, None, "cuda", **words))
            callers = await stack.enter_async_context(
                Child("callers", "-m", "tests.bench.text_callers", network.size.name, str(pool.port))
            )
            for _ in range(repeats):
                for at_once, texts in LOADS:
                    before = pool.cpu_s()
                    await callers.command(callers=at_once, texts=texts, seconds=seconds)
                    told = await callers.line()
                    used = [after - was for after, was in zip(pool.cpu_s(), before, strict=True)]
                    told |= {
                        "server_us": 1e6 * used[0] / told["requests"],
                        "worker_us": 1e6 * used[1] / told["requests"],
                    }
                    found.setdefault((workers, at_once, texts), []).append(told)
            print(f"served with {workers} workers: done", file=sys.stderr, flush=True)
    rows = []
    for (workers, at_once, texts), all_told in found.items():
        spread = {key: Spread.of(one[key] for one in all_told) for key in all_told[0]}
        report.figures[f"{network.size.name}.workers_{workers}.c{at_once}_of_{texts}"] = spread
        rows.append(
            (
                f"{workers} workers, {at_once} callers of {texts}",
                f"{spread['texts_per_s']:.0f}",
                f"{1e3 * spread['p50_s'].median:.2f}",
                f"{spread['server_us']:.0f}",
                f"{spread['worker_us']:.0f}",
                f"{spread['failed'].median:.0f}",
            )
        )
    table((network.size.name, "texts/s", "p50 ms", "server µs a request", "workers µs", "failed"), rows)
    most = max(Spread.of(one["texts_per_s"] for one in all_told).median for all_told in found.values())
    print(f"{network.size.name}: the engine alone, {MOST_ROWS} a call in order of arrival: {bare:.0f} texts/s")
    report.goal(Goal(f"{network.size.name}.served_over_bare", most / bare.median, LEAST_OF_BARE))
    failed = sum(one["failed"] for all_told in found.values() for one in all_told)
    report.goal(Goal(f"{network.size.name}.failed", float(failed), 0.0, "<="))


def _bare(network: Network, repeats: int) -> Spread:
    """The same engine in this process, whose rows come in any order."""
    import time

    from tidegate.engines.encoder.torch_packed import TorchPackedEngine

    engine = TorchPackedEngine(network.packed("bf16"), outputs=("sentence_embedding",), device="cuda")
    rows = draw_rows(ROWS)
    batches = [packed(rows[at : at + MOST_ROWS]) for at in range(0, len(rows), MOST_ROWS)]
    rates = []
    for _ in range(3 + repeats):
        began = time.perf_counter()
        for batch in batches:
            engine.infer(batch)
        rates.append(len(rows) / (time.perf_counter() - began))
    return Spread.of(rates[3:])


def run(report: Report, network: Network, seconds: float, repeats: int) -> None:
    asyncio.run(measure(report, network, seconds, repeats))

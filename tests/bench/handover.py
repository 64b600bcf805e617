"""What it costs to hand a batch to a worker and its results back: through shared memory, and through the socket.

One real worker of each kind, on the text model (16 bytes in and 8 out for each token), the same arrays in turn. A round
trip is the call's time without what the worker computed in it. Shared memory should be no slower from
`SHARE_FROM_BYTES` on (the first size), and several times as quick for large batches.

    python -m tests.bench.handover [--quick]
"""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import uvloop

from tests.bench.harness import Goal, Report, Spread, parser, ratios, table
from tests.cloud_pool.workers_support import text, write_text_model
from tidegate import clock
from tidegate.workers.array_transport import SHARE_FROM_BYTES
from tidegate.workers.process import EngineSpec, WorkerProcess

SIZES = {"0.07 MB": (1, 4096), "0.2 MB": (1, 12800), "1.6 MB": (64, 1600), "25 MB": (64, 25000)}  # rows and tokens
KINDS = {"socket": 1 << 40, "shared": SHARE_FROM_BYTES}
_CALLS = 30


async def round_trip_s(worker: WorkerProcess, rows: int, tokens: int) -> float:
    """The median of some calls."""
    arrays, took = text(tokens, rows=rows), []
    for _ in range(_CALLS):
        began_at = clock.now()
        computed = await worker.infer("text", arrays)
        took.append(clock.now() - began_at - computed.compute_s)
        del computed  # else its segment is still in use in the next call
    return median(took)


async def measure(repeats: int) -> dict[tuple[str, str], list[float]]:
    """By size and kind: the seconds of each repeat."""
    found: dict[tuple[str, str], list[float]] = {(size, kind): [] for size in SIZES for kind in KINDS}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spec = EngineSpec("text", "onnx", write_text_model(folder / "text.onnx"), ("sum", "twice"))
        workers = {}
        for kind, share_from_bytes in KINDS.items():
            workers[kind] = await stack.enter_async_context(WorkerProcess(kind, share_from_bytes=share_from_bytes))
            await workers[kind].load(spec)
        for repeat in range(-1, repeats):
            for size, (rows, tokens) in SIZES.items():
                for kind, worker in workers.items():
                    took_s = await round_trip_s(worker, rows, tokens)
                    if repeat >= 0:  # the first one warms up
                        found[size, kind].append(took_s)
    return found


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    repeats = options.repeats or (2 if options.quick else 7)
    report = Report("handover", {"repeats": repeats, "calls": _CALLS, "share_from_bytes": SHARE_FROM_BYTES})
    found = uvloop.run(measure(repeats))
    gains = {size: ratios(found[size, "socket"], found[size, "shared"]) for size in SIZES}
    rows = []
    for size in SIZES:
        spreads = {kind: Spread.of(1e3 * took_s for took_s in found[size, kind]) for kind in KINDS}
        rows.append((size, f"{spreads['socket']:.2f}", f"{spreads['shared']:.2f}", f"{gains[size]:.1f}"))
        report.figures[size] = {"socket_ms": spreads["socket"], "shared_ms": spreads["shared"], "gain": gains[size]}
    table(("inputs", "socket ms", "shared ms", "times as quick"), rows)
    report.goal(Goal("handover_gain_0.07MB", gains["0.07 MB"].median, 0.95))
    report.goal(Goal("handover_gain_1.6MB", gains["1.6 MB"].median, 2.0))
    report.goal(Goal("handover_gain_25MB", gains["25 MB"].median, 2.0))
    report.write()


if __name__ == "__main__":
    main()

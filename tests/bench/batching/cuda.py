"""On a GPU: what share of a bare loop's rate the server keeps, one row at a time and saturated.

The bare loop is the same engine in this process: rows sorted by length, in batches as large as the manifest allows,
one call after another. The variant is the model's bf16 one, or else whatever torch variant there is, by name in the
results together with the device. Skipped without CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.bench.batching import servers
from tests.bench.batching.alone import OUTPUT
from tests.bench.batching.contenders import Server
from tests.bench.batching.servers import DEMO, Pool, Where
from tests.bench.batching.texts import Row, read_rows
from tests.bench.harness import Child, Goal, Report
from tidegate.engines.engine import Engine, load_engine

CALLERS: Final = 256
_ROWS: Final = 1024
_BATCH: Final = 64
_TORCH: Final = ("torch-export", "torchscript")


async def cuda(report: Report, scratch: Path, seconds: float) -> None:
    import torch

    if not torch.cuda.is_available():
        report.goal(Goal("cuda.saturated_over_bare", None, 0.9, why="there is no CUDA device"))
        return
    variant = _variant(servers.demo_manifest())
    found = report.figures["cuda"] = {"device": torch.cuda.get_device_name(), "variant": variant["name"]}
    rows = read_rows(scratch / "rows.json")["mixed"][:_ROWS]
    engine = load_engine(variant["engine"], DEMO / variant["artefact"], outputs=(OUTPUT,), device="cuda")
    found["bare_rps"], found["bare_batch_1_rps"] = _bare(engine, rows, _BATCH), _bare(engine, rows, 1)
    del engine
    torch.cuda.empty_cache()
    servers.add_model(scratch / "cuda", "minilm", variant, {"max_batch_size": _BATCH})
    async with Child("generator", "-m", "tests.bench.batching.generator", str(scratch / "rows.json")) as generator:
        with Pool("cuda", scratch / "cuda", scratch, None, "cuda", precision=variant["precision"]) as pool:
            server = Server("cuda", generator, Where("link", pool.port, "minilm"))
            found["batch_1_rps"] = (await server.closed(1, seconds, 0))["rps"]
            found["saturated_rps"] = (await server.closed(CALLERS, seconds, 0))["rps"]
    report.goal(Goal("cuda.saturated_over_bare", found["saturated_rps"] / found["bare_rps"], 0.9))
    report.goal(Goal("cuda.batch_1_over_bare", found["batch_1_rps"] / found["bare_batch_1_rps"], 0.9))


def _variant(manifest: dict[str, Any]) -> dict[str, Any]:
    """bf16 before others; a packed one is not what a bare padded loop runs."""
    plain = [one for one in manifest["variants"] if one["engine"] in _TORCH and not one.get("packed")]
    found: dict[str, Any] = min(plain, key=lambda one: one["precision"] != "bf16")
    return found


def _bare(engine: Engine, rows: Sequence[Row], most: int) -> float:
    """Rows a second, sorted, in batches of so many; the second time round, when everything is warm."""
    ordered = sorted(rows, key=len)
    batches = [_padded(ordered[at : at + most]) for at in range(0, len(ordered), most)]
    took_s = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for batch in batches:
            engine.infer(batch)
        took_s = time.perf_counter() - began
    return len(rows) / took_s


def _padded(rows: Sequence[Row]) -> dict[str, Any]:
    ids = np.zeros((len(rows), len(rows[-1])), np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask}

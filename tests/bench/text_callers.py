"""Callers over one link, each asking again when it was answered; a process of its own.

    python -m tests.bench.text_callers MODEL PORT

Commands and answers are lines of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
import uvloop

from tests.bench.batching.targets import Oip, opened
from tests.bench.gpu.networks import Arrays, draw_rows, padded
from tests.bench.load_generator import tell
from tidegate.engines.encoder.torch_packed import IDS, MASK
from tidegate.types import Datatype, InferRequest, Tensor

BUDGET_S = 30.0


def requests_of(model: str, texts: int) -> list[InferRequest]:
    """Texts of like lengths share a request, as a client that sends many sorts them."""
    rows = draw_rows(1024)
    if texts > 1:
        rows = sorted(rows, key=len)
    batches = [padded(rows[at : at + texts]) for at in range(0, len(rows), texts)]
    return [InferRequest(model, tuple(_tensor(name, one) for name in (IDS, MASK))) for one in batches]


def _tensor(name: str, arrays: Arrays) -> Tensor:
    return Tensor(name, Datatype.INT64, arrays[name].shape, arrays[name].tobytes())


async def measure(asked: Oip, model: str, callers: int, texts: int, seconds: float) -> dict[str, Any]:
    requests = cycle(requests_of(model, texts))
    took, failed = list[float](), 0
    began = perf_counter()

    async def caller() -> None:
        nonlocal failed
        while perf_counter() < began + seconds:
            sent = perf_counter()
            seen = await asked.ask_request(next(requests), BUDGET_S)
            failed += not seen.answered
            took.append(perf_counter() - sent)

    gc.collect()
    await asyncio.gather(*[caller() for _ in range(callers)])
    elapsed = perf_counter() - began
    p50, p99 = (float(one) for one in np.percentile(took, (50, 99)))
    answered = len(took) - failed
    return {
        "requests": len(took), "texts_per_s": answered * texts / elapsed, "p50_s": p50, "p99_s": p99, "failed": failed
    }  # fmt: skip


async def main(model: str, port: int) -> None:
    async with opened("link", port, model) as asked:
        assert isinstance(asked, Oip)
        tell(event="ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            tell(**await measure(asked, model, **json.loads(line)))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))

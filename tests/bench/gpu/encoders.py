"""Encoders on a GPU, in this process: the pool's engines against torch as anybody would run it.

    packed        the pool's engine over packed rows: in fp16 and bf16 flash attention and CUDA graphs
    eager         the same without CUDA graphs
    exported      the pool's engine for exported programs, in batches that are padded
    torch         transformers' module in batches that are padded: plain, and by torch.compile, whose graphs are off,
                  since each length would be recorded anew

Two loads: one row after another, and all rows sorted by length, 64 a call. Each call goes from arrays in memory to
arrays in memory, as it does in a worker. Answers are compared with the module's own in fp32 on the CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tests.bench.gpu.networks import (
    MINILM,
    MOST_ROWS,
    OUTPUT,
    Arrays,
    Network,
    Row,
    draw_rows,
    export_network,
    packed,
    padded,
)
from tests.bench.harness import Goal, Report, Spread, ratios, table
from tidegate.engines.encoder.bert import PackedBert
from tidegate.engines.encoder.torch_packed import IDS, LENGTHS, MASK, TorchPackedEngine, load_packed
from tidegate.engines.engine import load_engine

DEVICE: Final = torch.device("cuda")
ROWS: Final = 1024
CHECKED: Final = 48
ALONE: Final = 256  # rows that are asked one after another
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_COSINE: Final = {"fp32": 0.9999, "fp16": 0.9999, "bf16": 0.999}


@dataclass
class Way:
    """One way to compute rows: which precision, how batches are made, and the call itself."""

    precision: str
    batch: Callable[[Sequence[Row]], Arrays]
    call: Callable[[Arrays], NDArray[Any]]
    rates: list[float] = field(default_factory=list)  # rows a second, many at a time
    alone_s: list[float] = field(default_factory=list)  # medians of a call with one row


def measure(report: Report, network: Network, repeats: int) -> None:
    rows = draw_rows(ROWS)
    ways = dict(_ways(network))
    name = network.size.name
    true = _true(network, rows[:CHECKED])
    cosines = dict[str, float]()
    for label, way in ways.items():
        began = time.perf_counter()
        cosines[label] = _least_cosine(way, rows[:CHECKED], true)
        print(f"{name}, {label}: first calls took {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    for repeat in range(repeats + 1):  # the first time warms up: kernels are chosen, shapes compiled and recorded
        for way in ways.values():
            _run(way, rows, kept=repeat > 0)
            torch.cuda.synchronize()
    shown = []
    for label, way in ways.items():
        rate, alone = Spread.of(way.rates), Spread.of(1e3 * one for one in way.alone_s)
        report.figures[f"{name}.{label.replace(' ', '_')}"] = {
            "rows_per_s": rate,
            "alone_ms": alone,
            "cosine": cosines[label],
        }
        shown.append((label, f"{rate:.0f}", f"{alone:.3f}", f"{cosines[label]:.6f}"))
        least = LEAST_COSINE[way.precision]
        if not label.startswith("torch"):
            report.goal(Goal(f"{name}.{label.replace(' ', '_')}.cosine", cosines[label], least))
    table((name, "rows/s", "one row, ms", "least cosine"), shown)
    best = max((label for label in ways if label.startswith("torch")), key=lambda one: median(ways[one].rates))
    fastest = max((label for label in ways if label.startswith("packed")), key=lambda one: median(ways[one].rates))
    gain = ratios(ways[fastest].rates, ways[best].rates)
    graphs = ratios(ways["eager bf16"].alone_s, ways["packed bf16"].alone_s)
    report.figures[f"{name}.packed_over_torch"] = gain
    report.figures[f"{name}.graphs_gain_alone"] = graphs
    print(f"{name}: {fastest} over {best}: {gain:.2f}; a lone row with graphs: {graphs:.2f} times as fast")
    report.goal(Goal(f"{name}.packed_over_torch", gain.median, 1.0))


def _ways(network: Network) -> Iterator[tuple[str, Way]]:
    for precision in DTYPES:
        engine = TorchPackedEngine(network.packed(precision), outputs=(OUTPUT,), device="cuda")
        yield f"packed {precision}", Way(precision, packed, _of_engine(engine))
    yield "eager bf16", Way("bf16", packed, _of_model(load_packed(network.packed("bf16"), DEVICE, most_graphs=0)))
    for precision in ("fp32", "bf16") if network.size is MINILM else ("bf16",):
        path = export_network(network, precision, DTYPES[precision])
        exported = load_engine("torch-export", path, outputs=(OUTPUT,), device="cuda")
        yield f"exported {precision}", Way(precision, padded, _of_engine(exported))
    module = deepcopy(network.module).to(DEVICE, torch.bfloat16)
    yield "torch bf16", Way("bf16", padded, _of_module(module))
    with suppress(ImportError):
        compiled = torch.compile(module, dynamic=True)
        yield "torch.compile bf16", Way("bf16", padded, _of_module(compiled))


def _of_engine(engine: Any) -> Callable[[Arrays], NDArray[Any]]:
    return lambda arrays: np.asarray(engine.infer(arrays)[OUTPUT])


def _of_model(model: PackedBert) -> Callable[[Arrays], NDArray[Any]]:
    def call(arrays: Arrays) -> NDArray[Any]:
        with torch.inference_mode():
            return model(arrays[IDS], arrays[LENGTHS], None)

    return call


def _of_module(module: Any) -> Callable[[Arrays], NDArray[Any]]:
    def call(arrays: Arrays) -> NDArray[Any]:
        with torch.inference_mode():
            given = [torch.from_numpy(arrays[name]).to(DEVICE) for name in (IDS, MASK)]
            answer: NDArray[Any] = module(*given).cpu().numpy()
        return answer

    return call


def _run(way: Way, rows: Sequence[Row], *, kept: bool) -> None:
    ordered = sorted(rows, key=len)
    batches = [way.batch(ordered[at : at + MOST_ROWS]) for at in range(0, len(ordered), MOST_ROWS)]
    began = time.perf_counter()
    for batch in batches:
        way.call(batch)
    rate = len(rows) / (time.perf_counter() - began)
    took = []
    for row in rows[:ALONE]:
        single = way.batch([row])
        began = time.perf_counter()
        way.call(single)
        took.append(time.perf_counter() - began)
    if kept:
        way.rates.append(rate)
        way.alone_s.append(median(took))


def _true(network: Network, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
    """Each row alone, in fp32 on the CPU."""
    with torch.inference_mode():
        singles = [padded([row]) for row in rows]
        return [network.module(*(torch.from_numpy(one[name]) for name in (IDS, MASK)))[0].numpy() for one in singles]


def _least_cosine(way: Way, rows: Sequence[Row], true: Sequence[NDArray[np.float32]]) -> float:
    """Of rows of unlike lengths that are computed together; the second time as well, which is from a graph."""
    told = [way.call(way.batch(rows)).astype(np.float32) for _ in range(4)]
    return min(float(np.dot(one, other)) for answer in told for one, other in zip(answer, true, strict=True))

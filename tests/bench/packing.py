"""What rows without padding gain: one thread, MiniLM, texts of log-normal length, against the best that padding can do.

    python -m tests.bench.packing [--quick] [--repeats 7]

These ways over the same rows, nobody serving: ONNX Runtime in fp32 over length groups of least cost (the padded limit),
torch's exported program over its own groups of least cost, and packed fp32 and bf16 in order of arrival, cut at so many
tokens a call; the last two also as they are where no C compiler is at hand (`engines/encoder/attention_kernel.py`).
Groups come from each runtime's own cost, fitted here.

Each repeat runs all ways in turn, a slice of each after a slice of the others, and ratios are taken within a repeat.
Time is the thread's own CPU time, so what others do on the machine counts less; rows are of real text, and the answers
of all ways are compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log
from pathlib import Path
from random import Random
from statistics import median
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.bench.harness import ROOT, Goal, Report, Spread, parser, ratios, table
from tidegate.engines.engine import Engine, load_engine
from tidegate.models.manifest import Manifest
from tidegate.models.packing import packing_of
from tidegate.models.repository import Repository
from tidegate.tools.build.demo.corpus import texts
from tidegate.tools.build.evaluate.measure import cosines

Row = NDArray[np.int64]
MEDIAN_TOKENS, SIGMA, FEWEST, MOST = 18, 0.9, 4, 256
MOST_ROWS = 64
SLICES = 6
CAP = 512  # tokens of a packed call
CAPS = (64, 128, 256, 512, 1024)
LIMIT = "padded fp32, ONNX Runtime"
TORCH = "padded fp32, torch program"
FP32, BF16 = "packed fp32", "packed bf16"
PLAIN = "no compiler"
OUTPUT = "sentence_embedding"


Call = tuple[dict[str, NDArray[Any]], list[int]]  # a batch, and the numbers of its rows


@dataclass(frozen=True)
class Way:
    engine: Engine
    calls: list[Call]


def draw_rows(repository: Repository, manifest: Manifest, count: int, seed: int) -> list[Row]:
    """Real tokens, cut to log-normal lengths."""
    from tokenizers import Tokenizer

    tokenizer = repository.tokenizer(manifest)
    ids = [one for e in Tokenizer.from_file(str(tokenizer)).encode_batch(texts(300)) for one in e.ids[1:-1]]
    random = Random(seed)
    lengths = [
        min(MOST, max(FEWEST, round(exp(log(MEDIAN_TOKENS) + SIGMA * random.gauss(0.0, 1.0))))) for _ in range(count)
    ]
    starts = [random.randrange(len(ids) - MOST) for _ in lengths]
    rows = zip(lengths, starts, strict=True)
    return [np.array([101, *ids[at : at + length - 2], 102], np.int64) for length, at in rows]


def padded(rows: Sequence[Row], fixed_tokens: float) -> list[Call]:
    """Groups of least cost where a call costs `fixed_tokens` more than its padded tokens."""
    order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
    best, starts = [0.0], list[int]()
    for end, longest in enumerate(len(rows[at]) for at in order):
        firsts = range(max(0, end - MOST_ROWS + 1), end + 1)
        cost, first = min((best[first] + fixed_tokens + (end - first + 1) * longest, first) for first in firsts)
        best.append(cost)
        starts.append(first)
    calls, last = [], len(rows) - 1
    while last >= 0:
        group = order[starts[last] : last + 1]
        calls.append((_rectangle([rows[at] for at in group]), group))
        last = starts[last] - 1
    return calls


def packed(rows: Sequence[Row], cap: int) -> list[Call]:
    """In order of arrival, as many as `cap` tokens hold."""
    return [(_packed([rows[at] for at in group]), group) for group in _cut(rows, cap)]


def _cut(rows: Sequence[Row], cap: int) -> Iterator[list[int]]:
    group, tokens = list[int](), 0
    for at, row in enumerate(rows):
        if group and tokens + len(row) > cap:
            yield group
            group, tokens = [], 0
        group.append(at)
        tokens += len(row)
    yield group


def _rectangle(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    longest = max(map(len, rows))
    ids = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
    mask = (np.arange(longest) < np.array([[len(row)] for row in rows])).astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask}


def _packed(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    ids = np.concatenate(rows)
    lengths = np.array([len(row) for row in rows], np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "lengths": lengths}


def fixed_tokens(engine: Engine) -> float:
    """What a call costs beside its tokens, in tokens: from one row of 8 and one of 128, the fastest of some."""
    took = []
    for length in (8, 128):
        feed = _rectangle([np.ones(length, np.int64)])
        took.append(min(_timed(partial(engine.infer, feed)) for _ in range(8)))
    slope = (took[1] - took[0]) / 120
    return max(0.0, took[0] / slope - 8)


def _timed(call: Callable[[], Any]) -> float:
    began = thread_time()
    call()
    return thread_time() - began


def answers(way: Way, count: int) -> NDArray[Any]:
    found = np.zeros((count, 384), np.float32)
    for feed, numbers in way.calls:
        found[numbers] = way.engine.infer(feed)[OUTPUT]
    return found


def measure(ways: dict[str, Way], count: int, repeats: int) -> dict[str, list[float]]:
    """Rows a second of each way in each repeat, slice after slice of all ways in turn."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        spent = dict.fromkeys(ways, 0.0)
        for part in range(SLICES):
            for name, way in ways.items():
                calls = way.calls[part * len(way.calls) // SLICES : (part + 1) * len(way.calls) // SLICES]
                spent[name] += _timed(partial(_run, way.engine, calls))
        for name, seconds in spent.items():
            rates[name].append(count / seconds)
    return rates


def _run(engine: Engine, calls: Sequence[Call]) -> None:
    for feed, _ in calls:
        engine.infer(feed)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--repository", type=Path, default=ROOT / ".tidegate" / "models")
    given = options.parse_args()
    repeats = given.repeats or (2 if given.quick else 7)
    count = 60 if given.quick else 300
    repository = Repository(given.repository)
    manifest = repository.manifest("minilm")

    def engine(name: str) -> Engine:
        variant = manifest.variant(name)
        assert variant is not None, f"build the model first: tidegate model build minilm ({name} is missing)"
        path = repository.artefact(manifest, variant)
        packing = packing_of(manifest, variant.packed)
        return load_engine(variant.engine, path, outputs=(OUTPUT,), threads=1, packing=packing)

    rows = draw_rows(repository, manifest, count, seed=1)
    onnx, program, fp32, bf16 = (engine(name) for name in ("fp32-onnx", "fp32-export", "fp32", "bf16"))
    fixed = {LIMIT: fixed_tokens(onnx), TORCH: fixed_tokens(program)}
    ways = {LIMIT: Way(onnx, padded(rows, fixed[LIMIT])), TORCH: Way(program, padded(rows, fixed[TORCH]))}
    caps = (CAP,) if given.quick else CAPS
    for cap in caps:
        ways |= {f"{FP32}, {cap}": Way(fp32, packed(rows, cap)), f"{BF16}, {cap}": Way(bf16, packed(rows, cap))}
    os.environ["CC"] = "none"
    for name, plain in ((FP32, engine("fp32")), (BF16, engine("bf16"))):
        ways[f"{name}, {CAP}, {PLAIN}"] = Way(plain, packed(rows, CAP))
    reference = answers(ways[LIMIT], count)
    closeness = {name: cosines(reference, answers(way, count)) for name, way in ways.items()}
    rates = measure(ways, count, repeats)
    report = Report("packing", {"rows": count, "repeats": repeats, "cap": CAP, "threads": 1, "fixed_tokens": fixed})
    show(report, rates, closeness, float(np.mean([len(row) for row in rows])))
    for name, least in ((f"{BF16}, {CAP}", 1.8), (f"{FP32}, {CAP}", 1.0)):
        report.goal(
            Goal(
                f"throughput of {name} tokens a call, of the padded limit",
                ratios(rates[name], rates[LIMIT]).median,
                least,
            )
        )
    report.goal(Goal("cosine of packed bf16, the worst row", float(closeness[f"{BF16}, {CAP}"].min()), 0.9998))
    report.write()


def show(report: Report, rates: dict[str, list[float]], closeness: dict[str, NDArray[Any]], tokens: float) -> None:
    lines = []
    for name, rate in rates.items():
        of_limit = ratios(rate, rates[LIMIT])
        report.figures[name] = {
            "rows_s": Spread.of(rate),
            "of_limit": of_limit,
            "us_token": 1e6 / (median(rate) * tokens),
            "cosine_mean": float(closeness[name].mean()),
            "cosine_least": float(closeness[name].min()),
        }
        spread, cosine = f"{Spread.of(rate):.0f}", f"{closeness[name].mean():.5f} / {closeness[name].min():.5f}"
        lines.append([name, spread, f"{of_limit:.2f}", f"{1e6 / (median(rate) * tokens):.0f}", cosine])
    print(f"{tokens:.1f} tokens a row; CPU seconds of one thread")
    table(["way, tokens a call", "rows/s", "of the padded limit", "us/token", "cosine mean / least"], lines)


if __name__ == "__main__":
    main()

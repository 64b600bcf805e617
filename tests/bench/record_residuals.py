"""Record how far calls of a real int8 model are from its measured table, one after another, on this machine.

    python -m tests.bench.record_residuals [--minutes 10] [--out tests/data/residuals.npz]

What the thresholds of degradation are calibrated on (`tests/bench/degradation.py`): real service times have tails and
come in stretches, and tables of what normal noise does say nothing of either. MiniLM's int8 variant is run on one
thread with rows of mixed length at independent instants; each call's log(seconds / table) is kept as an integer in
thousandths, in order. Nothing is smoothed or left out. What else ran on the machine is part of it, as it is in life.
"""

from __future__ import annotations

import argparse
from math import log
from pathlib import Path
from random import Random
from statistics import quantiles

import numpy as np

from tests.bench.harness import ROOT
from tidegate import clock
from tidegate.engines.engine import load_engine
from tidegate.estimate.cost_table import CostTable
from tidegate.models.example import example_arrays
from tidegate.models.repository import Repository

_LENGTHS = (4, 8, 16, 32, 64, 128)
_GAP_S = 0.02
_WARM_CALLS = 12


async def record(minutes: float) -> list[float]:
    """Log-residuals of calls, in order."""
    manifest = next(one for one in Repository(ROOT / ".tidegate/models").manifests() if one.name == "minilm")
    variant = next(one for one in manifest.variants if one.name == "int8")
    artefact = ROOT / ".tidegate/models" / manifest.name / manifest.version / variant.artefact
    engine = load_engine("onnx", artefact, outputs=tuple(one.name for one in manifest.outputs))
    axis = next(one for spec in manifest.inputs for one in reversed(spec.shape) if isinstance(one, str))
    inputs = {length: example_arrays(manifest, {axis: length}) for length in range(min(_LENGTHS), max(_LENGTHS) + 1)}

    def timed(length: int) -> float:
        begun = clock.now()
        engine.infer(inputs[length])
        return clock.now() - begun

    table = CostTable([(n, min(timed(n) for _ in range(_WARM_CALLS))) for n in _LENGTHS])
    draw, found, until = Random(0), [], clock.now() + 60.0 * minutes
    while clock.now() < until:
        length = min(max(_LENGTHS), max(min(_LENGTHS), round(24.0 * draw.lognormvariate(0.0, 0.6))))
        found.append(log(timed(length) / table.seconds_for(length)))
        await clock.sleep(_GAP_S * draw.expovariate(1.0))
    return found


def main() -> None:
    import asyncio

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--out", type=Path, default=ROOT / "tests/data/residuals.npz")
    chosen = options.parse_args()
    found = asyncio.run(record(chosen.minutes))
    cuts = quantiles(found, n=100)
    print(f"{len(found)} calls: median {cuts[49]:+.3f}, p5 {cuts[4]:+.3f}, p95 {cuts[94]:+.3f}, p99 {cuts[98]:+.3f}")
    np.savez_compressed(chosen.out, log_residual_milli=np.array([round(1e3 * one) for one in found], dtype=np.int16))


if __name__ == "__main__":
    main()

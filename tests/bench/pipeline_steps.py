"""What a step of a pipeline costs beside its own work, over a bare call of the same model in the same run.

    python -m tests.bench.pipeline_steps [--quick]

A real ONNX model of three scores, in this process as a worker runs it, with one step more at a time. What a step adds
is the time of the call with it less that without it, in turn, in CPU time of the thread, so that neighbours on the
machine count for little; its own work is what its function takes for the same tensors by itself. A WebAssembly step
that gives its input back has no work of its own: all of it is the sandbox, its store, and the two copies.

The step `image_decode` is held against Pillow by itself: opening a file of PNG, RGB, the size and an array of it. Both
take milliseconds for a photograph, so they are called in turn, one by one, and the median of the differences is told.
The step makes fewer copies than that usual way, which pays for its checks and more where the image is large; so a small
image is measured as well, which shows the checks by themselves.

Behind it the same through a worker process: text in and the name of a class out, seven steps of which two are
modules, against the bare model with tokens in.

Aim: at most 50 microseconds a step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import uvloop
from msgspec.structs import replace
from numpy.typing import NDArray
from PIL import Image

from tests.bench.harness import Goal, Report, Spread, parser, table
from tests.support.models.images import as_file, as_tensor
from tests.support.models.pipelines import LABELS, wat_of_the_docs, weather_repository
from tidegate import clock
from tidegate.engines.engine import load_engine
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Cost, Manifest, Pipeline, TensorSpec
from tidegate.models.steps import ImageDecodeStep, SoftmaxStep, Step, TopKStep, WasmStep
from tidegate.pipeline.config import default_steps
from tidegate.pipeline.pipeline_engine import PipelineEngine
from tidegate.pipeline.plan import StepPlan, plan_of
from tidegate.pipeline.scores import softmax, top_k
from tidegate.types import Datatype
from tidegate.workers.process import EngineSpec, WorkerProcess

AIM_US: Final = 50.0
_CALLS: Final = 20  # in a turn: so few that what disturbs one disturbs its neighbours
_TURNS: Final = 50
_PAIRS: Final = 100
_SAME: Final = """
(module (memory (export "memory") 1)
  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
  (func (export "run") (param i32 i32) (result i64)
    (i64.or (i64.shl (i64.extend_i32_u (local.get 0)) (i64.const 32)) (i64.extend_i32_u (local.get 1)))))
"""


def added_us(more: Callable[[], object], less: Callable[[], object], *own: Callable[[], object]) -> float:
    """CPU microseconds that a call of `more` takes beyond one of `less` and of `own`: the median of short turns."""
    return median(_turn_us(more) - _turn_us(less) - sum(map(_turn_us, own)) for _ in range(_TURNS))


def _turn_us(call: Callable[[], object]) -> float:
    began = time.thread_time()
    for _ in range(_CALLS):
        call()
    return (time.thread_time() - began) / _CALLS * 1e6


def scored(folder: Path, manifest: Manifest, steps: Sequence[Step]) -> PipelineEngine:
    """The model with these steps after it; the last one's first tensor is the answer."""
    rows = ("batch", len(LABELS))
    inner = manifest.of_model
    scores = TensorSpec("token_scores", Datatype.FP32, rows)
    specs = [TensorSpec(name, Datatype.FP32, rows) for name in ("same", "again", "shares")]
    specs += [TensorSpec("best", Datatype.FP32, ("batch", 1)), TensorSpec("place", Datatype.INT64, ("batch", 1))]
    last = steps[-1].outputs[0]
    pipeline = Pipeline((replace(inner.inputs[0], shape=("batch",)),), (scores,), Cost("items", "input_ids"))
    pipeline = replace(pipeline, after=tuple(steps), tensors=tuple(specs))
    of = replace(
        manifest,
        inputs=pipeline.inputs,
        outputs=tuple(spec for spec in specs if spec.name == last),
        pipeline=pipeline,
    )
    plan = plan_of(of, str(folder), default_steps().limits)
    assert plan is not None
    return PipelineEngine(plan, OneRow(folder))


class OneRow:
    """The real model, for one token: its scores as float32[1, classes]."""

    def __init__(self, folder: Path) -> None:
        self._engine = load_engine("onnx", folder / "model.onnx", outputs=("token_scores",))
        self._mask = np.ones((1, 1), np.int64)

    def infer(self, inputs: Any) -> dict[str, NDArray[Any]]:
        tokens = {"input_ids": inputs["input_ids"][:, None], "attention_mask": self._mask}
        return {"token_scores": self._engine.infer(tokens)["token_scores"][:, 0]}

    def __repr__(self) -> str:
        return f"<OneRow {self._engine!r}>"


def decoding_us(side: int, repeats: int) -> list[float]:
    """What `image_decode` adds to Pillow's own work for a photograph of twice as many pixels a side as it becomes."""
    noise = np.random.default_rng(1).integers(0, 256, (56, 56, 3)).astype(np.uint8)
    file = as_file(Image.fromarray(noise).resize((2 * side, 2 * side)))
    pixels = TensorSpec("pixels", Datatype.UINT8, ("batch", side, side, 3))
    step = ImageDecodeStep(("file",), ("pixels",), height=side, width=side)
    pipeline = Pipeline((pixels,), (), Cost("pixels", "pixels"), before=(step,))
    files = TensorSpec("file", Datatype.BYTES, ("batch",))
    limits = default_steps().limits
    engine = PipelineEngine(StepPlan(pipeline, (files,), (), {"batch": Axis(1, 8)}, "", limits=limits, part="before"))
    given = {"file": as_tensor(file)}

    def pillow() -> object:
        with Image.open(BytesIO(file), formats=("PNG",)) as image:
            return np.array(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR))

    return [between_us(lambda: engine.infer(given), pillow) for _ in range(repeats + 1)][1:]


def between_us(more: Callable[[], object], less: Callable[[], object]) -> float:
    """CPU microseconds between a call of `more` and one of `less`: the median over pairs, in alternating order."""
    found = []
    for pair in range(_PAIRS):
        if pair % 2:
            found.append(_once_us(more) - _once_us(less))
        else:
            found.append(-_once_us(less) + _once_us(more))
    return median(found)


def _once_us(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e6


def module_step(folder: Path, takes: str, gives: str) -> WasmStep:
    path = folder / "same.wasm"
    return WasmStep((takes,), (gives,), path.name, sha256_of(path), path.stat().st_size)


def steps_us(folder: Path, manifest: Manifest, repeats: int, *, modules: bool) -> dict[str, list[float]]:
    """What each step adds beside its own work, of each repeat."""
    ids = {"input_ids": np.array([1], np.int64)}
    shares, best = SoftmaxStep(("token_scores",), ("shares",)), TopKStep(("shares",), ("best", "place"), k=1)
    bare, one, two = OneRow(folder), scored(folder, manifest, [shares]), scored(folder, manifest, [shares, best])
    scores = bare.infer(ids)["token_scores"]
    found: dict[str, list[float]] = {"a pipeline with one step": [], "one step more": []}
    engines: list[PipelineEngine] = []
    if modules:
        same, again = module_step(folder, "token_scores", "same"), module_step(folder, "same", "again")
        engines = [scored(folder, manifest, [same]), scored(folder, manifest, [same, again])]
        found["a WebAssembly step more"] = []
    for repeat in range(-1, repeats):
        values = [
            added_us(lambda: one.infer(ids), lambda: bare.infer(ids), lambda: softmax(scores)),
            added_us(lambda: two.infer(ids), lambda: one.infer(ids), lambda: top_k(best, scores)),
        ]
        if engines:
            values.append(added_us(lambda: engines[1].infer(ids), lambda: engines[0].infer(ids)))
        for name, value in zip(found, values, strict=True):
            if repeat >= 0:  # the first one warms up
                found[name].append(value)
    return found


async def through_worker_us(folder: Path, manifest: Manifest, repeats: int) -> dict[str, list[float]]:
    """Wall microseconds of a call over a worker process, with all seven steps and without any."""
    plan = plan_of(manifest, str(folder), default_steps().limits)
    artefact, outputs = folder / "model.onnx", ("token_scores",)
    tokens = {"input_ids": np.array([[1, 3]], np.int64), "attention_mask": np.ones((1, 2), np.int64)}
    text = np.array([b"calm tide"], object)
    found: dict[str, list[float]] = {"bare model": [], "seven steps around it": []}
    async with WorkerProcess("steps") as worker:
        await worker.load(EngineSpec("bare model", "onnx", artefact, outputs))
        await worker.load(EngineSpec("seven steps around it", "onnx", artefact, outputs, steps=plan))
        for repeat in range(-1, repeats):
            for name, inputs in zip(found, (tokens, {"text": text}), strict=True):
                taken = []
                for _ in range(_CALLS * _TURNS // 5):
                    began_at = clock.now()
                    await worker.infer(name, inputs, budget_s=1.0)
                    taken.append(clock.now() - began_at)
                if repeat >= 0:
                    found[name].append(1e6 * median(taken))
    return found


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    repeats = options.repeats or (2 if options.quick else 9)
    report = Report("pipeline_steps", {"repeats": repeats, "turns": _TURNS, "calls": _CALLS})
    with tempfile.TemporaryDirectory() as root:
        there = find_spec("wasmtime") is not None
        modules = {"redact": b"\0asm", "clip": b"\0asm"}
        if there:
            import wasmtime

            modules = {name: bytes(wasmtime.wat2wasm(text)) for name, text in wat_of_the_docs().items()}
        manifest = weather_repository(Path(root), modules)
        folder = Path(root) / manifest.name / manifest.version
        if there:
            (folder / "same.wasm").write_bytes(wasmtime.wat2wasm(_SAME))
        found = steps_us(folder, manifest, repeats, modules=there)
        found["image_decode, beside Pillow"] = decoding_us(224, repeats)
        found["image_decode of a small image"] = decoding_us(16, repeats)
        if there:
            found |= uvloop.run(through_worker_us(folder, manifest, repeats))
    spreads = {name: Spread.of(values) for name, values in found.items()}
    table(
        ("microseconds", "median", "from", "to"),
        [(name, f"{one.median:.1f}", f"{one.low:.1f}", f"{one.high:.1f}") for name, one in spreads.items()],
    )
    report.figures |= spreads
    report.goal(Goal("pipeline_step_us", spreads["one step more"].median, AIM_US, "<="))
    report.goal(Goal("pipeline_of_one_step_us", spreads["a pipeline with one step"].median, AIM_US, "<="))
    report.goal(Goal("image_decode_step_us", spreads["image_decode, beside Pillow"].median, AIM_US, "<="))
    small = spreads["image_decode of a small image"].median
    report.goal(Goal("image_decode_small_step_us", small, AIM_US, "<="))
    module = spreads.get("a WebAssembly step more")
    why = "" if module is not None else "wasmtime is not installed"
    report.goal(Goal("wasm_step_us", None if module is None else module.median, AIM_US, "<=", why))
    report.write()


if __name__ == "__main__":
    main()

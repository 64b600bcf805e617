"""Checks a pipeline: each tensor comes into being once, from tensors of a kind that the step takes, and all ends meet.

Tensors are followed from the request's inputs through the steps before the model, the model, and the steps after it.
What a step takes and gives is checked by datatype and rank; lengths that are not fixed are checked when it runs
(`tidegate/pipeline/tensor_check.py`). Pure, and part of `validate.py`: each problem is a sentence that starts with its
key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Final

from tidegate.models.manifest import Manifest, Pipeline, TensorSpec
from tidegate.models.steps import (
    MOST_STEPS,
    ImageDecodeStep,
    LabelsStep,
    NormaliseStep,
    PoolingStep,
    ResizeStep,
    SoftmaxStep,
    Step,
    StepWithFile,
    TokenizeStep,
    TopKStep,
    WasmStep,
    kind_of,
)
from tidegate.types import Datatype

_FLOATS: Final = frozenset({Datatype.FP16, Datatype.FP32, Datatype.FP64})
_IDS: Final = frozenset({Datatype.INT32, Datatype.INT64})
_PIXELS: Final = frozenset({Datatype.UINT8, Datatype.FP32})
_DECODED: Final = frozenset({Datatype.UINT8, Datatype.FP16, Datatype.FP32})
_MOST_SIDE: Final = 16384  # pixels
_MOST_DECODED_PIXELS: Final = 1 << 26  # of a request; 4 bytes each, and as many again while modes are changed
_MOST_ENCODED_BYTES: Final = 64 << 20
_MOST_TENSORS: Final = 64
Specs = Sequence[TensorSpec]


def pipeline_problems(manifest: Manifest, pipeline: Pipeline) -> Iterator[str]:
    """Everything that is wrong with it, but for its tensors' shapes and files' names, which are checked as all are."""
    if not pipeline.steps:
        yield "pipeline: has no steps; leave the section out"
    if len(pipeline.steps) > MOST_STEPS:
        yield f"pipeline: {len(pipeline.steps)} steps, but at most {MOST_STEPS} are run"
    if len(pipeline.tensors) > _MOST_TENSORS:
        yield f"pipeline.tensors: {len(pipeline.tensors)} tensors, but there may be {_MOST_TENSORS} at most"
    for key, there in (
        ("generative", manifest.generative is not None),
        ("sequence", manifest.sequence is not None),
        ("text", manifest.text is not None),
        ("warmup", bool(manifest.warmup)),
    ):
        if there:
            yield f"pipeline: does not go with the section {key!r}; leave one of them out"
    specs, problems = _declared(manifest, pipeline)
    yield from problems
    if not problems:
        yield from _flow(manifest, pipeline, specs)
        yield from _most_pixels(manifest, pipeline, specs)
    yield from _files(pipeline)


def _declared(manifest: Manifest, pipeline: Pipeline) -> tuple[dict[str, TensorSpec], list[str]]:
    """The declaration of each name, and which names have two that differ."""
    specs: dict[str, TensorSpec] = {}
    problems: list[str] = []
    for spec in (*manifest.inputs, *pipeline.inputs, *pipeline.outputs, *manifest.outputs, *pipeline.tensors):
        known = specs.setdefault(spec.name, spec)
        if (known.datatype, known.shape) != (spec.datatype, spec.shape):
            problems.append(f"pipeline: {spec.name!r} is declared twice, with different datatypes or shapes")
        if spec.optional:
            problems.append(f"pipeline: {spec.name!r} is optional, and steps cannot do without any of their tensors")
    return specs, problems


def _flow(manifest: Manifest, pipeline: Pipeline, specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    there = {spec.name for spec in manifest.inputs}
    yield from _side("before", pipeline.before, specs, there)
    for spec in pipeline.inputs:
        if spec.name not in there:
            yield f"pipeline.inputs: nothing gives {spec.name!r} (before the model there are: {_names(there)})"
    for spec in pipeline.outputs:
        if spec.name in there:
            yield f"pipeline.outputs: {spec.name!r} is there before the model gives it; name one of them otherwise"
        there.add(spec.name)
    yield from _side("after", pipeline.after, specs, there)
    given = {spec.name for spec in manifest.inputs}
    for spec in manifest.outputs:
        if spec.name not in there:
            yield f"outputs: nothing gives {spec.name!r} (at the pipeline's end there are: {_names(there)})"
        elif spec.name in given:
            yield f"outputs: {spec.name!r} is an input of the request; answers do not repeat those"


def _side(side: str, steps: Sequence[Step], specs: Mapping[str, TensorSpec], there: set[str]) -> Iterator[str]:
    """Check the steps of one side, and add what they give to what is there."""
    for index, step in enumerate(steps):
        key = f"pipeline.{side}[{index}] ({kind_of(step)})"
        wrong = False
        for name in step.inputs:
            if name not in there:
                yield f"{key}.inputs: there is no {name!r} yet (there are: {_names(there)})"
                wrong = True
        for name in step.outputs:
            if name in there:
                yield f"{key}.outputs: {name!r} is there already; each tensor is given once"
            elif name not in specs:
                yield f"{key}.outputs: {name!r} is not declared; say its datatype and shape in pipeline.tensors"
                wrong = True
            there.add(name)
        if not step.inputs or not step.outputs:
            yield f"{key}: takes and gives at least one tensor"
        elif not wrong:
            takes = [specs[name] for name in step.inputs if name in specs]
            yield from (f"{key}: {problem}" for problem in _step(step, takes, [specs[one] for one in step.outputs]))


def _most_pixels(manifest: Manifest, pipeline: Pipeline, specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    """Whether as many images as a batch may have can be decoded at all, were they no larger than the model's own."""
    for step in pipeline.before:
        if not isinstance(step, ImageDecodeStep) or not step.inputs or not specs[step.inputs[0]].shape:
            continue
        rows = specs[step.inputs[0]].shape[0]
        if isinstance(rows, str):
            rows = min(manifest.axes[rows].max, manifest.batching.max_batch_size) if rows in manifest.axes else 1
        if rows * step.height * step.width > step.max_pixels:
            yield (
                f"pipeline (image_decode).max_pixels: {step.max_pixels} are fewer than {rows} images of {step.height} "
                f"x {step.width} have, which is the largest batch; raise it, or lower batching.max_batch_size"
            )


def _files(pipeline: Pipeline) -> Iterator[str]:
    digests: dict[str, str] = {}
    for step in pipeline.steps:
        if not isinstance(step, StepWithFile):
            continue
        if digests.setdefault(step.file, step.sha256) != step.sha256:
            yield f"pipeline: the file {step.file!r} has two different digests"
        if step.size_bytes < 0:
            yield f"pipeline: {step.file!r}: size_bytes {step.size_bytes} must not be negative"


def _step(step: Step, takes: Specs, gives: Specs) -> Iterator[str]:
    yield from _CHECKS[type(step)](step, takes, gives)


def _tokenize(step: TokenizeStep, takes: Specs, gives: Specs) -> Iterator[str]:
    yield from _counts(takes, gives, (1,), (1, 2))
    if step.max_tokens < 1:
        yield f"max_tokens: {step.max_tokens} must be at least 1"
    yield from _of(takes[:1], frozenset({Datatype.BYTES}), 1, "texts")
    yield from _of(gives, _IDS, 2, "token ids and their mask")
    if gives and takes and gives[0].shape[:1] != takes[0].shape[:1]:
        yield f"{gives[0].name!r} must have as many rows as {takes[0].name!r}"
    if len({spec.shape for spec in gives}) > 1:
        yield "ids and mask must have one shape"


def _image_decode(step: ImageDecodeStep, takes: Specs, gives: Specs) -> Iterator[str]:
    yield from _counts(takes, gives, (1,), (1,))
    yield from _sides(step.height, step.width)
    if step.height * step.width > _MOST_DECODED_PIXELS:
        yield f"height: {step.height} x {step.width} are more than {_MOST_DECODED_PIXELS} pixels"
    bounds = (("max_pixels", step.max_pixels, _MOST_DECODED_PIXELS), ("max_bytes", step.max_bytes, _MOST_ENCODED_BYTES))
    for key, value, most in bounds:
        if not 1 <= value <= most:
            yield f"{key}: {value} must be from 1 to {most}"
    yield from _of(takes, frozenset({Datatype.BYTES}), 1, "files of images")
    yield from _of(gives, _DECODED, 4, "images")
    channels = 3 if step.channels == "RGB" else 1
    yield from _scaling(step, channels)
    sides = (step.height, step.width)
    wanted = (channels, *sides) if step.layout == "nchw" else (*sides, channels)
    for spec in gives:
        if len(spec.shape) == 4 and spec.shape[1:] != wanted:
            yield f"{spec.name!r} has shape {list(spec.shape)}, but each image becomes {list(wanted)} ({step.layout})"
        if takes and spec.shape[:1] != takes[0].shape[:1]:
            yield f"{spec.name!r} must have as many rows as {takes[0].name!r}"
        if spec.datatype is Datatype.UINT8 and (step.scale, step.mean, step.std) != (1.0, (0.0,), (1.0,)):
            yield f"scale: {spec.name!r} is UINT8, and what is scaled is FP32 or FP16; leave scale, mean and std out"


def _sides(height: int, width: int) -> Iterator[str]:
    for key, side in (("height", height), ("width", width)):
        if not 1 <= side <= _MOST_SIDE:
            yield f"{key}: {side} must be from 1 to {_MOST_SIDE} pixels"


def _resize(step: ResizeStep, takes: Specs, gives: Specs) -> Iterator[str]:
    yield from _counts(takes, gives, (1,), (1,))
    yield from _sides(step.height, step.width)
    yield from _of(takes, _PIXELS, 4, "images [rows, height, width, channels]")
    yield from _of(gives, frozenset({Datatype.FP32}), 4, "images [rows, height, width, channels]")
    if gives and len(gives[0].shape) == 4 and gives[0].shape[1:3] != (step.height, step.width):
        yield f"{gives[0].name!r} has shape {list(gives[0].shape)}, but images become {step.height} x {step.width}"


def _normalise(step: NormaliseStep, takes: Specs, gives: Specs) -> Iterator[str]:
    yield from _counts(takes, gives, (1,), (1,))
    yield from _of(takes, _PIXELS, 4, "images [rows, height, width, channels]")
    yield from _of(gives, frozenset({Datatype.FP32}), 4, "images")
    yield from _scaling(step, takes[0].shape[3] if takes and len(takes[0].shape) == 4 else 1)


def _scaling(step: NormaliseStep | ImageDecodeStep, channels: int | str) -> Iterator[str]:
    for key, values in (("mean", step.mean), ("std", step.std)):
        if len(values) != 1 and len(values) != channels:
            yield f"{key}: {len(values)} values for {channels} channels; give one, or one a channel"
        if not all(isfinite(one) for one in values) or (key == "std" and not all(values)):
            yield f"{key}: {list(values)} must be finite{', and not 0' if key == 'std' else ''}"
    if not isfinite(step.scale):
        yield f"scale: {step.scale:g} must be finite"


def _pool(step: PoolingStep, takes: Specs, gives: Specs) -> Iterator[str]:
    yield from _counts(takes, gives, (1, 2), (1,))
    yield from _of(takes[:1], _FLOATS, 3, "vectors of tokens [rows, tokens, size]")
    yield from _of(takes[1:], _IDS | {Datatype.BOOL}, 2, "a mask [rows, tokens]")
    yield from _of(gives, frozenset({Datatype.FP32}), 2, "vectors [rows, size]")


def _softmax(step: SoftmaxStep, takes: Specs, gives: Specs) -> Iterator[str]:
    yield from _counts(takes, gives, (1,), (1,))
    yield from _of(takes, _FLOATS, None, "scores")
    yield from _of(gives, frozenset({Datatype.FP32}), None, "probabilities")
    if takes and gives and takes[0].shape != gives[0].shape:
        yield f"{gives[0].name!r} must have the shape of {takes[0].name!r}"


def _top_k(step: TopKStep, takes: Specs, gives: Specs) -> Iterator[str]:
    yield from _counts(takes, gives, (1,), (1, 2))
    yield from _of(takes, _FLOATS, 2, "scores [rows, classes]")
    yield from _of(gives[:1], frozenset({Datatype.FP32}), 2, "values [rows, k]")
    yield from _of(gives[1:], frozenset({Datatype.INT64}), 2, "places [rows, k]")
    classes = takes[0].shape[-1] if takes and takes[0].shape else 1
    if step.k < 1 or (isinstance(classes, int) and step.k > classes):
        yield f"k: {step.k} must be from 1 to {classes}, the number of classes"
    for spec in gives:
        if spec.shape[-1:] != (step.k,):
            yield f"{spec.name!r} must have {step.k} as its last length, k"


def _labels(step: LabelsStep, takes: Specs, gives: Specs) -> Iterator[str]:
    yield from _counts(takes, gives, (1,), (1,))
    yield from _of(takes, _IDS, None, "places")
    yield from _of(gives, frozenset({Datatype.BYTES}), None, "names")
    if takes and gives and takes[0].shape != gives[0].shape:
        yield f"{gives[0].name!r} must have the shape of {takes[0].name!r}"


def _wasm(step: WasmStep, takes: Specs, gives: Specs) -> Iterator[str]:
    yield from ()


_CHECKS: Final[Mapping[type, Callable[[Any, Specs, Specs], Iterator[str]]]] = {
    TokenizeStep: _tokenize,
    ImageDecodeStep: _image_decode,
    ResizeStep: _resize,
    NormaliseStep: _normalise,
    PoolingStep: _pool,
    SoftmaxStep: _softmax,
    TopKStep: _top_k,
    LabelsStep: _labels,
    WasmStep: _wasm,
}


def _counts(takes: Specs, gives: Specs, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Iterator[str]:
    for word, count, allowed in (("inputs", len(takes), inputs), ("outputs", len(gives), outputs)):
        if count not in allowed:
            yield f"{word}: {count} tensors, but the step has {' or '.join(map(str, allowed))}"


def _of(specs: Specs, datatypes: frozenset[Datatype], rank: int | None, what: str) -> Iterator[str]:
    for spec in specs:
        if spec.datatype not in datatypes:
            known = ", ".join(sorted(one.value for one in datatypes))
            yield f"{spec.name!r} is {spec.datatype.value}; {what} are {known}"
        if (rank is not None and len(spec.shape) != rank) or not spec.shape:
            yield f"{spec.name!r} has shape {list(spec.shape)}; {what} have {rank or 'at least 1'} dimensions"


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"

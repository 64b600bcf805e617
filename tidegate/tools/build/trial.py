"""A trial runs a drafted model's artefacts to find out what the manifest may promise.

An artefact's description is trusted only after it was run: at the shortest and at the longest lengths that the
manifest will promise, with the outputs compared to what it says. Where nothing limits an axis, the longest length is
found by running, halving a generous guess until every artefact takes it.

What the edge should take at most is measured too: as much as it answers here, on one thread, in a quarter of the
model's default budget; the rest is for the link, the queue and a device that is slower. The pool may join requests
only if rows answer as they do alone, and requests of unequal length only if a padded row does: both are tried and not
assumed. A first axis need not count rows: it is the time of torch's recurrent layers, and two callers' sequences one
behind the other are a third one. The trial can be wrong where made-up inputs do not show it, such as integers without
bounds, which are all zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate import clock
from tidegate.engines.engine import Engine, EngineError
from tidegate.models.example import example_arrays
from tidegate.models.manifest import Axis, Manifest, TensorSpec, Where
from tidegate.tools.build.draft import Draft, batch_axis, mask_of, row_axis
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.measure import as_numbers
from tidegate.types import Datatype

_EDGE_SHARE = 0.25  # of the default budget
_TYPICAL_LENGTH = 64
_TRIALS = 3  # with other values each: an answer that is a class is often the same by luck
_SHORT = 8  # the length of axes where rows are joined, if it may be
_NOISE = 0.05  # dynamic int8 scales a batch's activations together, by which rows differ a little
_FLOATS = {Datatype.FP16, Datatype.BF16, Datatype.FP32, Datatype.FP64}


def limited_by_running(drafted: Draft, engines: Mapping[Where, Engine], notes: list[str]) -> Manifest:
    """The manifest with its open axes as long as every artefact takes them."""
    manifest = drafted.manifest
    for where, engine in engines.items():
        if (error := _failure(engine, manifest, {})) is not None:
            raise BuildError(
                f"the {where}'s artefact cannot be run on the smallest inputs that are described: "
                f"{' '.join(str(error).split())}; where an exporter fixed a length that the file calls free, export it "
                "anew (torch.onnx.export with dynamo=True and dynamic_shapes)"
            )
    for name in drafted.open_axes:
        axis = manifest.axes[name]
        most = _longest(manifest, name, engines)
        manifest = msgspec.structs.replace(manifest, axes={**manifest.axes, name: Axis(axis.min, most)})
        notes.append(f"axis {name}: {axis.min} to {most}; no artefact limits it (--axis {name}={axis.min}:{most})")
    return manifest


def check_answers(manifest: Manifest, engines: Mapping[Where, Engine]) -> None:
    """Raise BuildError unless every artefact answers with the outputs of the manifest, at all ends of its axes."""
    inputs = {entry for spec in manifest.inputs for entry in spec.shape}
    ends = [{}, *({name: axis.max} for name, axis in manifest.axes.items() if name in inputs)]
    for where, engine in engines.items():
        for lengths in ends:
            try:
                answer = engine.infer(example_arrays(manifest, lengths))
            except EngineError as error:
                raise BuildError(
                    f"the {where}'s artefact fails at {lengths or 'the smallest inputs'}: {error}"
                ) from error
            for spec in manifest.outputs:
                _check_output(where, spec, answer.get(spec.name), manifest, lengths)


def with_joining(manifest: Manifest, engines: Mapping[Where, Engine], notes: list[str]) -> Manifest:
    """The manifest, with one request a call where the pool's artefact answers rows otherwise beside those of others."""
    engine, axis = engines.get("pool"), _joined_axis(manifest)
    if engine is None or axis is None or _is_harmless(_joined_as_alone, manifest, axis, engine):
        return manifest
    notes.append(
        f"batching: one request a call (policy: none), since rows along {axis} answer otherwise beside those of "
        "another request, or otherwise each time"
    )
    # Of as many rows as a request may have: it must not be computed in parts either.
    alone = msgspec.structs.replace(manifest.batching, policy="none", max_batch_size=manifest.axes[axis].max)
    return msgspec.structs.replace(manifest, batching=alone)


def with_padding(manifest: Manifest, engines: Mapping[Where, Engine], notes: list[str]) -> Manifest:
    axis, mask, engine = row_axis(manifest), mask_of(manifest), engines.get("pool")
    if axis is None or mask is None or engine is None or manifest.batching.policy == "none":
        return manifest
    in_outputs = any(axis in spec.shape for spec in manifest.outputs)
    if in_outputs or not _is_harmless(_padded_as_alone, manifest, axis, engine):
        notes.append(f"batching: only rows of equal {axis} are joined, since padding changes the answer")
        return manifest
    notes.append(
        f"batching: rows are padded along {axis} and joined; a padded row was found to answer as it does alone"
    )
    return msgspec.structs.replace(manifest, batching=msgspec.structs.replace(manifest.batching, pad_axis=axis))


def edge_limits(
    manifest: Manifest, engine: Engine, notes: list[str], *, max_batch: int | None, max_tokens: int | None
) -> tuple[int | None, int | None]:
    """The most rows and the longest row that the edge should take: as given, else as measured; None for no limit."""
    share_s = manifest.default_budget_s * _EDGE_SHARE
    rows, row = batch_axis(manifest), row_axis(manifest)
    typical = {row: max(manifest.axes[row].min, min(_TYPICAL_LENGTH, manifest.axes[row].max))} if row else {}
    batch = max_batch or (_most_within(manifest, engine, rows, typical, share_s) if rows else None)
    tokens = max_tokens or (_most_within(manifest, engine, row, {}, share_s) if row else None)
    if batch is None and tokens is None:
        notes.append(f"edge: any request that the manifest allows; all were done here in {share_s:g} s")
    for flag, limit, what in (("batch", batch, "rows a request"), ("tokens", tokens, "tokens a row")):
        given = max_batch if flag == "batch" else max_tokens
        if limit is not None and given is None:
            notes.append(f"edge: up to {limit} {what}, done here in {share_s:g} s (--edge-max-{flag} {limit})")
    return batch, tokens


def _longest(manifest: Manifest, name: str, engines: Mapping[Where, Engine]) -> int:
    axis = manifest.axes[name]
    most = axis.max
    while most > axis.min and any(_failure(engine, manifest, {name: most}) for engine in engines.values()):
        most = max(axis.min, most // 2)
    return most


def _failure(engine: Engine, manifest: Manifest, lengths: Mapping[str, int]) -> EngineError | None:
    try:
        engine.infer(example_arrays(manifest, lengths))
    except EngineError as error:
        return error
    return None


def _check_output(
    where: Where, spec: TensorSpec, array: NDArray[Any] | None, manifest: Manifest, lengths: Mapping[str, int]
) -> None:
    if array is None:
        raise BuildError(f"the {where}'s artefact has no output {spec.name!r}")
    if array.dtype != np.dtype(spec.datatype.numpy_name):
        raise BuildError(f"the {where}'s output {spec.name!r} is {array.dtype}, not {spec.datatype.value}")
    inputs = {entry for one in manifest.inputs for entry in one.shape}
    sizes = {name: lengths.get(name, axis.min) for name, axis in manifest.axes.items() if name in inputs}
    wanted = [sizes.get(entry) if isinstance(entry, str) else entry for entry in spec.shape]
    fits = len(wanted) == array.ndim and all(
        length in (None, actual) for length, actual in zip(wanted, array.shape, strict=True)
    )
    if not fits:
        raise BuildError(
            f"the {where}'s output {spec.name!r} has shape {list(array.shape)}, but was described as {list(spec.shape)}"
        )


def _is_harmless(trial: Callable[[Manifest, str, Engine], bool], manifest: Manifest, axis: str, engine: Engine) -> bool:
    """Whether the trial finds the same answers; an artefact that fails at it gives none."""
    try:
        return trial(manifest, axis, engine)
    except EngineError:
        return False


def _padded_as_alone(manifest: Manifest, axis: str, engine: Engine) -> bool:
    length = manifest.axes[axis]
    short = max(length.min, min(length.max // 2, _TYPICAL_LENGTH // 2))
    if 2 * short > length.max:
        return False
    shapes = {spec.name: spec.shape for spec in manifest.inputs}
    for seed in range(_TRIALS):
        alone = example_arrays(manifest, {axis: short}, seed)
        padded = {
            name: np.pad(array, [(0, short if entry == axis else 0) for entry in shapes[name]])
            for name, array in alone.items()
        }
        expected, got = engine.infer(alone), engine.infer(padded)
        if not all(_alike(spec, expected[spec.name], got[spec.name]) for spec in manifest.outputs):
            return False
    return True


def _joined_axis(manifest: Manifest) -> str | None:
    """The axis along which a pool joins requests, which begins the shape of every tensor; None where there is none."""
    firsts = {spec.shape[:1] for spec in (*manifest.inputs, *manifest.outputs)}
    first = next(iter(firsts), ())
    return first[0] if len(firsts) == 1 and first and isinstance(first[0], str) else None


def _joined_as_alone(manifest: Manifest, axis: str, engine: Engine) -> bool:
    rows = max(1, manifest.axes[axis].min)
    if 2 * rows > manifest.axes[axis].max:
        return True  # no two requests fit into one
    lengths = {name: min(one.max, max(one.min, _SHORT)) for name, one in manifest.axes.items()} | {axis: rows}
    if _failure(engine, manifest, lengths) is not None:  # takes some lengths and others not
        lengths = {axis: rows}
    for seed in range(_TRIALS):
        members = [example_arrays(manifest, lengths, 2 * seed + which) for which in range(2)]
        apart = [engine.infer({name: array.copy() for name, array in one.items()}) for one in members]
        together = engine.infer({name: np.concatenate([one[name] for one in members]) for name in members[0]})
        for spec in manifest.outputs:
            expected = np.concatenate([answer[spec.name] for answer in apart])
            if not _alike(spec, expected, together[spec.name], share=_NOISE):
                return False
    return True


def _alike(spec: TensorSpec, expected: NDArray[Any], got: NDArray[Any], *, share: float = 0.0) -> bool:
    """Whether two answers are one, but for rounding.

    Args:
        share: of the answers' length, by how much they may differ; 0: each element is compared.
    """
    if expected.shape != got.shape:
        return False
    if spec.datatype not in _FLOATS:
        return bool(np.array_equal(expected, got))
    expected, got = (as_numbers(array, spec.datatype).astype(np.float64) for array in (expected, got))
    odd = ~np.isfinite(expected)
    if not np.array_equal(expected[odd], got[odd], equal_nan=True) or not np.isfinite(got[~odd]).all():
        return False
    expected, got = expected[~odd], got[~odd]
    if share:
        return bool(np.linalg.norm(got - expected) <= share * np.linalg.norm(expected))
    # As small as the answers are: an absolute tolerance would have it that all probabilities of 1e-5 are the same.
    most = float(np.abs(expected).max(initial=0.0))
    return bool(np.allclose(expected, got, rtol=1e-3, atol=min(1e-4, 1e-3 * most)))


def _most_within(manifest: Manifest, engine: Engine, axis: str, others: Mapping[str, int], most_s: float) -> int | None:
    """The longest of the axis' doubled lengths that runs in `most_s`; None when all of them do."""
    length = max(1, manifest.axes[axis].min)
    while length < manifest.axes[axis].max:
        longer = min(2 * length, manifest.axes[axis].max)
        if _seconds(engine, manifest, {**others, axis: longer}) > most_s:
            return length
        length = longer
    return None


def _seconds(engine: Engine, manifest: Manifest, lengths: Mapping[str, int]) -> float:
    inputs = example_arrays(manifest, lengths)
    taken = []
    for _ in range(2):  # the first run of a size also pays for its memory
        started = clock.now()
        engine.infer(inputs)
        taken.append(clock.now() - started)
    return min(taken)

"""A trial runs a drafted model's artefacts to find out what the manifest may promise.

An artefact's description is trusted only after it was run: at the shortest and at the longest lengths that the
manifest will promise, with the outputs compared to what it says. Where nothing limits an axis, the longest length is
found by running, halving a generous guess until every artefact takes it.

What the edge should take at most is measured too: as much as it answers here, on one thread, in a quarter of the
model's default budget; the rest is for the link, the queue and a device that is slower. The pool may join requests of
unequal length only if a padded row answers as it does alone, which is tried and not assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
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

_EDGE_SHARE = 0.25  # of the default budget
_TYPICAL_LENGTH = 64


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


def with_padding(manifest: Manifest, engines: Mapping[Where, Engine], notes: list[str]) -> Manifest:
    axis, mask, engine = row_axis(manifest), mask_of(manifest), engines.get("pool")
    if axis is None or mask is None or engine is None:
        return manifest
    if any(axis in spec.shape for spec in manifest.outputs) or not _padding_is_harmless(manifest, axis, mask, engine):
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


def _padding_is_harmless(manifest: Manifest, axis: str, mask: TensorSpec, engine: Engine) -> bool:
    length = manifest.axes[axis]
    short = max(length.min, min(length.max // 2, _TYPICAL_LENGTH // 2))
    if 2 * short > length.max:
        return False
    alone = example_arrays(manifest, {axis: short})
    shapes = {spec.name: spec.shape for spec in manifest.inputs}
    padded = {
        name: np.pad(array, [(0, short if entry == axis else 0) for entry in shapes[name]])
        for name, array in alone.items()
    }
    expected, got = engine.infer(alone), engine.infer(padded)
    return all(np.allclose(expected[spec.name], got[spec.name], rtol=1e-3, atol=1e-4) for spec in manifest.outputs)


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

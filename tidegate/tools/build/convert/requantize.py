"""`tidegate model quantize` quantizes a user's model, then reports what was gained and what was lost.

The target appears only when it is whole and was found to run. Without data of the user's the comparison runs on
made-up inputs and says so: random ids are no text, and a quality measured on them shows only that the model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tidegate.engines.engine import EngineError
from tidegate.engines.onnx import OnnxEngine
from tidegate.models.example import example_arrays
from tidegate.models.manifest import Manifest
from tidegate.storage.atomic_file import replacing
from tidegate.tools.build.agree import agreed_signature
from tidegate.tools.build.convert.quantize import quantize_dynamically, quantize_statically
from tidegate.tools.build.draft import DraftOptions, batch_axis, draft, row_axis
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.compare import Metric, closeness, latencies_s, measured_output
from tidegate.tools.build.inspect.onnx_file import signature_of
from tidegate.tools.build.inspect.onnx_weights import in_one_file, load_onnx
from tidegate.tools.build.samples import Samples, load_samples
from tidegate.tools.build.trial import limited_by_running

_SIZES = ((1, 16), (1, 128), (8, 32))  # rows, and their length where rows vary
_MADE_UP = 16


def requantize(
    source: Path, target: Path, *, static: bool, calibration: Path | None, evaluation: Path | None, metric: Metric
) -> Iterator[str]:
    """Quantize and yield the report, line by line. Raises BuildError."""
    if static and calibration is None:
        raise BuildError("--static needs --calibration x.npz: scales are fixed from real inputs")
    if source.resolve() == target.resolve():
        raise BuildError(f"{target}: the int8 model cannot replace the model that it is made from")
    model = load_onnx(source)
    signature = signature_of(model.graph, source)
    if signature.precision == "int8":
        raise BuildError(f"{source}: is quantized already")
    inputs = [port.name for port in signature.inputs]
    given = load_samples(calibration, inputs) if calibration else None
    samples = load_samples(evaluation, inputs) if evaluation else given
    drafted = draft("model", "1", agreed_signature([signature]), DraftOptions())
    try:
        with in_one_file(source) as whole:
            reference = OnnxEngine(whole)
            manifest = limited_by_running(drafted, {"edge": reference}, [])
            # Measured before it appears, so that a target that is there is one that was found to run.
            with replacing(target) as temporary:
                if static and given is not None:
                    quantize_statically(source, temporary, given.feeds)
                else:
                    quantize_dynamically(source, temporary)
                report = [
                    _size(whole, temporary),
                    *_report(reference, OnnxEngine(temporary), manifest, samples, metric),
                ]
    except EngineError as error:
        raise BuildError(str(error)) from error
    except OSError as error:
        raise BuildError(f"{target}: {error.strerror or error}") from error
    yield from report
    if not static and any(node.op_type == "Conv" for node in model.graph.node):
        yield "hint     convolutions are slow with scales made anew in each call: try --static --calibration x.npz"


def _report(
    reference: OnnxEngine, candidate: OnnxEngine, manifest: Manifest, samples: Samples | None, metric: Metric
) -> Iterator[str]:
    feeds = _sized(manifest) if samples is None else {"one sample": samples.feeds[0], **_joined(samples, manifest)}
    for label, taken in latencies_s({"fp32": reference, "int8": candidate}, feeds).items():
        times = taken["fp32"] / taken["int8"]
        yield f"latency  {taken['fp32'] * 1e3:.2f} → {taken['int8'] * 1e3:.2f} ms ({times:.1f}x) for {label}"
    measured = samples or Samples(tuple(_made_up(manifest)))
    output = measured_output(manifest)
    if output is None:
        yield "quality  not measured: no output is of numbers"
        return
    found = closeness(reference, candidate, measured.feeds, output=output, metric=metric, labels=measured.labels)
    what = "cosine to fp32" if metric == "cosine" else "top-1, same class as fp32"
    if found.reference is not None:
        yield f"quality  top-1 {found.reference:.4f} → {found.value:.4f} on {found.samples} labelled samples"
    elif samples is not None:
        yield f"quality  {what} {found.value:.4f} on {found.samples} samples of {output.name}"
    else:
        yield f"quality  {what} {found.value:.4f} on {found.samples} made-up inputs: give real ones with --evaluation"


def _size(source: Path, target: Path) -> str:
    before, after = source.stat().st_size, target.stat().st_size
    return f"size     {before / 1e6:.2f} → {after / 1e6:.2f} MB ({after / before:.0%})"


def _lengths(manifest: Manifest, rows: int, length: int) -> dict[str, int]:
    wanted = {axis: size for axis, size in ((batch_axis(manifest), rows), (row_axis(manifest), length)) if axis}
    return {name: min(max(size, manifest.axes[name].min), manifest.axes[name].max) for name, size in wanted.items()}


def _sized(manifest: Manifest) -> dict[str, dict[str, np.ndarray]]:
    found = {}
    for rows, length in _SIZES:
        lengths = _lengths(manifest, rows, length)
        label = " by ".join(f"{size} ({name})" for name, size in lengths.items()) or "one call"
        found[label] = example_arrays(manifest, lengths)
    return found


def _joined(samples: Samples, manifest: Manifest) -> dict[str, dict[str, np.ndarray]]:
    """Eight samples in one call, where the model takes several rows."""
    if batch_axis(manifest) is None or len(samples.feeds) < 8:
        return {}
    several: Sequence[dict[str, np.ndarray]] = samples.feeds[:8]
    return {"eight samples": {name: np.concatenate([feed[name] for feed in several]) for name in several[0]}}


def _made_up(manifest: Manifest) -> Iterator[dict[str, np.ndarray]]:
    for seed in range(_MADE_UP):
        yield example_arrays(manifest, _lengths(manifest, 1, 8 * (1 + seed % 8)), seed)

"""What tensors of a graph look like on example inputs: their shapes, by the axes that they grow with, and the work.

Shapes are seen and not inferred: exporters compute them in the graph, where ONNX's inference loses track. The graph is
run twice with its tensors as outputs, with every axis at two lengths that no other axis has. A dimension that stays is
fixed; one that is both lengths of an axis is that axis; and a tensor with any other dimension, such as one that is half
of an axis, is left out, since no manifest could describe it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from tidegate.engines.engine import load_engine
from tidegate.models.example import example_arrays
from tidegate.models.manifest import Manifest
from tidegate.tools.build.split.activation_codec import Shape

_LENGTHS: Final = ((2, 3), (17, 29), (19, 31), (23, 37))  # of each axis in the two runs: no two alike
_PRODUCTS: Final = ("Conv", "ConvTranspose", "MatMul", "Gemm")

Arrays = Mapping[str, NDArray[Any]]


class TwoRuns(NamedTuple):
    """The lengths of all axes in each of two runs."""

    first: dict[str, int]
    second: dict[str, int]


def two_runs(manifest: Manifest) -> TwoRuns:
    """Lengths that tell the model's axes apart, as far as their limits allow."""
    inputs = {entry for spec in manifest.inputs for entry in spec.shape}
    named = [name for name in manifest.axes if name in inputs]
    first, second = {}, {}
    for place, name in enumerate(named):
        axis, (one, other) = manifest.axes[name], _LENGTHS[min(place, len(_LENGTHS) - 1)]
        first[name] = max(axis.min, min(axis.max, one))
        second[name] = max(axis.min, min(axis.max, other))
    return TwoRuns(first, second)


def tensors_of(model: onnx.ModelProto, names: Iterable[str], manifest: Manifest, lengths: Mapping[str, int]) -> Arrays:
    """The named tensors for example inputs of these lengths. Raises EngineError: the graph does not run."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    del watched.graph.value_info[:]
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    with TemporaryDirectory(prefix="tidegate-split-") as folder:
        path = Path(folder) / "watched.onnx"
        path.write_bytes(watched.SerializeToString())
        return load_engine("onnx", path, outputs=()).infer(example_arrays(manifest, lengths))


def shape_of(first: NDArray[Any], second: NDArray[Any], runs: TwoRuns) -> Shape | None:
    """The shape of a tensor that was seen in both runs, in lengths and names of axes; None: it has no such shape."""
    if first.ndim != second.ndim or first.ndim < 2 or first.dtype != np.float32:
        return None
    shape: list[int | str] = []
    for one, other in zip(first.shape, second.shape, strict=True):
        if one == other:
            shape.append(int(one))
            continue
        axis = next((name for name in runs.first if (runs.first[name], runs.second[name]) == (one, other)), None)
        if axis is None:
            return None
        shape.append(axis)
    return tuple(shape)


def products(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes whose multiplications are counted."""
    return [node for node in graph.node if node.op_type in _PRODUCTS]


def multiplications(node: onnx.NodeProto, seen: Mapping[str, tuple[int, ...]]) -> int:
    """Of one such node. Args: seen: the shapes of tensors and weights, as far as they are known."""
    out, left, right = seen.get(node.output[0], ()), seen.get(node.input[0], ()), seen.get(node.input[1], ())
    if not out:
        return 0
    if node.op_type == "Conv":  # weights are [out, in / groups, *kernel]
        return prod(out) * prod(right[1:])
    if node.op_type == "ConvTranspose":  # [in, out / groups, *kernel], once for each element of the input
        return prod(left) * prod(right[1:])
    inner = right[-2] if len(right) > 1 else left[-1] if left else 1
    if node.op_type == "Gemm" and any(one.name == "transB" and one.i for one in node.attribute):
        inner = right[-1]
    return prod(out) * inner

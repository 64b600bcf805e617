"""The tensor between two halves is compressed by nodes of the head's graph, and decompressed by nodes of the tail's.

So a gateway passes it on as it passes on any tensor, and knows nothing of how it is made.

    fp32    as it is
    fp16    halves; what lies beyond ±65504 becomes that
    int8    per channel: scale = max |x| / 127 over a row's other elements, q = round(x / scale)

Scales are of each row and channel by itself, so that a row's answer does not depend on the rows that a pool batches it
with, and travel as a second tensor: a channel of an image's features has thousands of elements to its one scale. The
channel is the second axis of features with four axes and the last one of rows of vectors; a matrix has a scale a row.
Symmetric, since padding with zeros must stay zero.

Invariants: |q| <= 127; a channel that is all zeros decompresses to zeros.
Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
CVPR 2018, for the scales; Laskaridis et al., "SPINN: Synergistic Progressive Inference of Neural Networks over Device
and Cloud", MobiCom 2020, for compressing what crosses the link between the halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tidegate.models.manifest import TensorSpec
from tidegate.models.split.layer_split import Activation
from tidegate.tools.build.errors import BuildError
from tidegate.types import Datatype

ACTIVATION: Final = "activation"
SCALE: Final = "activation_scale"
_LEAST_OPSET: Final = 13  # from here on a cast saturates nothing, and Clip takes its bounds as inputs
_AXES_AS_INPUT: Final = 18  # of ReduceMax
_FP16_MOST: Final = 65504.0
_INT8_MOST: Final = 127.0
_LEAST_SCALE: Final = 1e-30
_DATATYPES: Final[dict[Activation, Datatype]] = {"fp32": Datatype.FP32, "fp16": Datatype.FP16, "int8": Datatype.INT8}
_PREFIX: Final = "/tidegate/split/"

Shape = tuple[int | str, ...]


def channel_axis(shape: Shape) -> int | None:
    """The axis of channels of a tensor whose first axis is rows; None: it has none, and a row is scaled as a whole."""
    if len(shape) < 3:
        return None
    fixed = [axis for axis in range(1, len(shape)) if isinstance(shape[axis], int)]
    if len(shape) == 3:  # [row, token, channel], or [row, channel, sample] where only the samples vary
        return 1 if fixed == [1] else 2
    return 1


def activation_specs(shape: Shape, activation: Activation) -> tuple[TensorSpec, ...]:
    """What travels for a tensor of this shape, as inputs and outputs of the halves' manifests."""
    tensor = TensorSpec(ACTIVATION, _DATATYPES[activation], shape)
    if activation != "int8":
        return (tensor,)
    channel = channel_axis(shape)
    scales = tuple(entry if axis in (0, channel) else 1 for axis, entry in enumerate(shape))
    return tensor, TensorSpec(SCALE, Datatype.FP32, scales)


def compress(head: onnx.ModelProto, tensor: str, shape: Shape, activation: Activation) -> None:
    """Let the head give `tensor` compressed, in place of itself. Raises BuildError: its opset is too old."""
    _check(head)
    graph, specs = head.graph, activation_specs(shape, activation)
    match activation:
        case "fp32":
            graph.node.append(helper.make_node("Identity", [tensor], [ACTIVATION]))
        case "fp16":
            bounds = [_constant(graph, "low", -_FP16_MOST), _constant(graph, "high", _FP16_MOST)]
            graph.node.extend(
                [
                    helper.make_node("Clip", [tensor, *bounds], [f"{_PREFIX}clipped"]),
                    helper.make_node("Cast", [f"{_PREFIX}clipped"], [ACTIVATION], to=TensorProto.FLOAT16),
                ]
            )
        case "int8":
            _compress_int8(head, tensor, shape)
    del graph.output[:]
    graph.output.extend(map(_port, specs))


def decompress(tail: onnx.ModelProto, tensor: str, shape: Shape, activation: Activation) -> None:
    """Let the tail take `tensor` compressed, in place of itself. Raises BuildError: its opset is too old."""
    _check(tail)
    graph, specs = tail.graph, activation_specs(shape, activation)
    if activation == "fp32":
        nodes = [helper.make_node("Identity", [ACTIVATION], [tensor])]
    elif activation == "fp16":
        nodes = [helper.make_node("Cast", [ACTIVATION], [tensor], to=TensorProto.FLOAT)]
    else:
        nodes = [
            helper.make_node("Cast", [ACTIVATION], [f"{_PREFIX}wide"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{_PREFIX}wide", SCALE], [tensor]),
        ]
    others = [one for one in graph.input if one.name != tensor]
    del graph.input[:]
    graph.input.extend([*map(_port, specs), *others])
    for place, node in enumerate(nodes):  # first, since nodes are in the order in which they are computed
        graph.node.insert(place, node)


def _compress_int8(head: onnx.ModelProto, tensor: str, shape: Shape) -> None:
    graph, channel = head.graph, channel_axis(shape)
    over = [axis for axis in range(1, len(shape)) if axis != channel]
    magnitude, peak, spread, ratio, rounded = (
        f"{_PREFIX}{name}" for name in ("magnitude", "peak", "spread", "ratio", "rounded")
    )
    graph.node.extend(
        [
            helper.make_node("Abs", [tensor], [magnitude]),
            _largest(head, magnitude, peak, over),
            helper.make_node("Div", [peak, _constant(graph, "most", _INT8_MOST)], [spread]),
            helper.make_node("Max", [spread, _constant(graph, "least", _LEAST_SCALE)], [SCALE]),
            helper.make_node("Div", [tensor, SCALE], [ratio]),
            helper.make_node("Round", [ratio], [rounded]),
            helper.make_node("Cast", [rounded], [ACTIVATION], to=TensorProto.INT8),
        ]
    )


def _largest(head: onnx.ModelProto, of: str, into: str, over: Sequence[int]) -> onnx.NodeProto:
    if _opset(head) < _AXES_AS_INPUT:
        return helper.make_node("ReduceMax", [of], [into], axes=list(over), keepdims=1)
    axes = numpy_helper.from_array(np.array(over, dtype=np.int64), f"{_PREFIX}axes")
    head.graph.initializer.append(axes)
    return helper.make_node("ReduceMax", [of, axes.name], [into], keepdims=1)


def _constant(graph: onnx.GraphProto, name: str, value: float) -> str:
    made = numpy_helper.from_array(np.array(value, dtype=np.float32), f"{_PREFIX}{name}")
    graph.initializer.append(made)
    return str(made.name)


def _port(spec: TensorSpec) -> onnx.ValueInfoProto:
    kinds = {Datatype.FP32: TensorProto.FLOAT, Datatype.FP16: TensorProto.FLOAT16, Datatype.INT8: TensorProto.INT8}
    return helper.make_tensor_value_info(spec.name, kinds[spec.datatype], list(spec.shape))


def _opset(model: onnx.ModelProto) -> int:
    return next((int(one.version) for one in model.opset_import if one.domain in ("", "ai.onnx")), 1)


def _check(model: onnx.ModelProto) -> None:
    if (opset := _opset(model)) < _LEAST_OPSET:
        raise BuildError(f"the model has opset {opset}, and a cut needs {_LEAST_OPSET}: export it anew, or convert it")
    graph = model.graph
    names = {name for node in graph.node for name in (*node.input, *node.output)}
    if taken := sorted(names & {ACTIVATION, SCALE}):
        raise BuildError(f"the model has a tensor {taken[0]!r}, which is what travels between halves; rename it")

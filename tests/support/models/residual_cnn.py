"""A residual network of untrained weights, made by hand: what may be cut between its blocks, and not inside of them.

    image float32[batch, 3, 32, 32] → block(8 channels, 32²) → block(16, 16²) → block(32, 8²) → mean
    → scores float32[batch, 10]

With `masked`, a second input float32[batch, 1] scales the features before the scores, as a mask does: it is small, and
the tail takes it as well.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Bounds, Cost, Manifest, TensorSpec, Variant, Where
from tidegate.models.repository import save_manifest
from tidegate.placement_pin import Pin
from tidegate.types import Datatype

NAME = "cnn"
SIZE = 32
BLOCKS = ((3, 8, 1), (8, 16, 2), (16, 32, 2))  # channels in and out, stride
ENDS = tuple(f"block{number}_out" for number in range(len(BLOCKS)))


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(3)

    def convolved(self, of: str, into: str, inside: int, out: int, kernel: int, stride: int) -> str:
        scale = (2.0 / (inside * kernel * kernel)) ** 0.5
        weights = (scale * self._random.standard_normal((out, inside, kernel, kernel))).astype(np.float32)
        self.weights.append(numpy_helper.from_array(weights, f"{into}_w"))
        pads = [kernel // 2] * 4
        self.nodes.append(helper.make_node("Conv", [of, f"{into}_w"], [into], pads=pads, strides=[stride, stride]))
        return into

    def block(self, of: str, name: str, inside: int, out: int, stride: int) -> str:
        first = self.convolved(of, f"{name}_first", inside, out, 3, stride)
        self.nodes.append(helper.make_node("Relu", [first], [f"{name}_relu"]))
        second = self.convolved(f"{name}_relu", f"{name}_second", out, out, 3, 1)
        around = self.convolved(of, f"{name}_around", inside, out, 1, stride)
        self.nodes.append(helper.make_node("Add", [second, around], [f"{name}_sum"]))
        self.nodes.append(helper.make_node("Relu", [f"{name}_sum"], [f"{name}_out"]))
        return f"{name}_out"


def residual_graph(*, masked: bool = False) -> onnx.ModelProto:
    made, at = _Graph(), "image"
    for number, (inside, out, stride) in enumerate(BLOCKS):
        at = made.block(at, f"block{number}", inside, out, stride)
    made.nodes.append(helper.make_node("ReduceMean", [at], ["features"], axes=[2, 3], keepdims=0))
    features = "features"
    if masked:
        made.nodes.append(helper.make_node("Mul", ["features", "mask"], ["kept"]))
        features = "kept"
    weights = np.random.default_rng(4).standard_normal((BLOCKS[-1][1], 10)).astype(np.float32)
    made.weights.append(numpy_helper.from_array(weights, "scores_w"))
    made.nodes.append(helper.make_node("MatMul", [features, "scores_w"], ["scores"]))
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, SIZE, SIZE])]
    if masked:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", 1]))
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10])]
    graph = helper.make_graph(made.nodes, "residual", inputs, outputs, made.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def residual_repository(
    root: Path, *, where: tuple[Where, ...] = ("edge", "pool"), masked: bool = False, pin: Pin = "any"
) -> Path:
    """A repository with the network, for these places. Returns `root`."""
    folder = root / NAME / "1"
    folder.mkdir(parents=True)
    path = folder / "fp32.onnx"
    path.write_bytes(residual_graph(masked=masked).SerializeToString())
    variant = Variant(
        name="fp32",
        artefact=path.name,
        engine="onnx",
        precision="fp32",
        where=where,
        sha256=sha256_of(path),
        size_bytes=path.stat().st_size,
    )
    mask = (TensorSpec("mask", Datatype.FP32, ("batch", 1), Bounds(0, 1)),) if masked else ()
    save_manifest(
        folder,
        Manifest(
            name=NAME,
            version="1",
            inputs=(TensorSpec("image", Datatype.FP32, ("batch", 3, SIZE, SIZE), Bounds(-8, 8)), *mask),
            outputs=(TensorSpec("scores", Datatype.FP32, ("batch", 10)),),
            variants=(variant,),
            cost=Cost("pixels", "image"),
            axes={"batch": Axis(1, 8)},
            pin=pin,
        ),
    )
    return root

"""Models of a few nodes, made by hand, for whoever needs a real runtime and no real model.

`double` answers y = 2x. `rounds` counts to the number that it is given, in the runtime, so a test chooses how long a
computation takes: 0 is at once (that is what warm-up asks for), FOREVER outlives every test. `classifier` scores four
classes by summing the features that belong to each, of which it may read only the first few. `sum_of_tokens` takes ids
and their mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from msgspec.structs import replace
from onnx import TensorProto, helper

from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Bounds, Cost, Manifest, TensorSpec, Variant
from tidegate.models.repository import save_manifest
from tidegate.types import Datatype

FOREVER = 10**15
_IR_VERSION, _OPSET = 9, 17  # what the oldest ONNX Runtime that we support reads


def tiny_repository(root: Path, versions: Sequence[str] = ("1",)) -> Path:
    """A repository with both models, `double` in these versions, for edges only. Returns `root`."""
    for version in versions:
        _add(root, replace(double_manifest(), version=version), double_graph())
    _add(root, rounds_manifest(), rounds_graph())
    return root


def double_manifest() -> Manifest:
    return Manifest(
        name="double",
        version="1",
        inputs=(TensorSpec("x", Datatype.FP32, ("batch", "width"), Bounds(-1e6, 1e6)),),
        outputs=(TensorSpec("y", Datatype.FP32, ("batch", "width")),),
        variants=(_variant("int8", max_batch=4, max_tokens=16),),
        cost=Cost("tokens", "x"),
        axes={"batch": Axis(1, 64), "width": Axis(1, 64)},
    )


def rounds_manifest() -> Manifest:
    return Manifest(
        name="rounds",
        version="1",
        inputs=(TensorSpec("rounds", Datatype.INT64, (1,)),),
        outputs=(TensorSpec("counted", Datatype.INT64, (1,)),),
        variants=(_variant("int8"),),
        cost=Cost("items", "rounds"),
    )


def write_double(path: Path) -> Path:
    """The model `double` as a file, without a repository around it."""
    onnx.save(double_graph(), path)
    return path


def double_graph() -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "width"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "width"])
    return _model(helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", [x], [y]))


def rounds_graph() -> onnx.ModelProto:
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["go_on_out"]),
            helper.make_node("Add", ["so_far", "one"], ["so_far_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("so_far", TensorProto.INT64, [1]),
        ],
        [
            helper.make_tensor_value_info("go_on_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("so_far_out", TensorProto.INT64, [1]),
        ],
        [one],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Squeeze", ["rounds"], ["trips"]),
            helper.make_node("Loop", ["trips", "yes", "zero"], ["counted"], body=body),
        ],
        "rounds",
        [helper.make_tensor_value_info("rounds", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("counted", TensorProto.INT64, [1])],
        [
            helper.make_tensor("yes", TensorProto.BOOL, [], [True]),
            helper.make_tensor("zero", TensorProto.INT64, [1], [0]),
        ],
    )
    return _model(graph)


def classifier(path: Path, *, features: int) -> Path:
    """Write a model of float32[batch, 8] → scores float32[batch, 4] that reads only the first `features`."""
    weights = [float(feature < features and feature % 4 == kind) for feature in range(8) for kind in range(4)]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weights"], ["scores"])],
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor("weights", TensorProto.FLOAT, [8, 4], weights)],
    )
    onnx.save(_model(graph), path)
    return path


def sum_of_tokens(path: Path) -> Path:
    """Write a model from `ids` and `mask`, both int64[batch, sequence], to `sum` float32[batch, 1]; returns `path`."""
    ports = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in ("ids", "mask")]
    nodes = [
        helper.make_node("Mul", ["ids", "mask"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "along"], ["total"], keepdims=1),
        helper.make_node("Cast", ["total"], ["sum"], to=TensorProto.FLOAT),
    ]
    end = helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["batch", 1])
    along = helper.make_tensor("along", TensorProto.INT64, [1], [1])
    path.write_bytes(_model(helper.make_graph(nodes, "sum", ports, [end], [along])).SerializeToString())
    return path


def _variant(name: str, *, max_batch: int | None = None, max_tokens: int | None = None) -> Variant:
    return Variant(
        name=name,
        artefact=f"{name}.onnx",
        engine="onnx",
        precision=name,
        where=("edge",),
        sha256="0" * 64,
        size_bytes=1,
        max_batch=max_batch,
        max_tokens=max_tokens,
    )


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    model = helper.make_model(graph, ir_version=_IR_VERSION, opset_imports=[helper.make_opsetid("", _OPSET)])
    onnx.checker.check_model(model)
    return model


def _add(root: Path, manifest: Manifest, model: onnx.ModelProto) -> None:
    folder = root / manifest.name / manifest.version
    folder.mkdir(parents=True)
    (variant,) = manifest.variants
    path = folder / variant.artefact
    onnx.save(model, path)
    written = replace(variant, sha256=sha256_of(path), size_bytes=path.stat().st_size)
    save_manifest(folder, replace(manifest, variants=(written,)))

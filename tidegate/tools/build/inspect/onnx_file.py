"""The signature of an ONNX file: names, types, dimensions, precision, and the bounds that its lookups imply.

An input of ids almost always ends as the index of a table (Gather); a value past the table's end would fail in the
middle of a batch, so the table's length becomes the input's bound.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from onnx import TensorProto

from tidegate.models.manifest import Bounds
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.inspect.onnx_weights import load_onnx
from tidegate.tools.build.inspect.signature import Dimension, ModelSignature, SignaturePort
from tidegate.types import Datatype

_DATATYPES = {
    TensorProto.BOOL: Datatype.BOOL, TensorProto.UINT8: Datatype.UINT8, TensorProto.UINT16: Datatype.UINT16,
    TensorProto.UINT32: Datatype.UINT32, TensorProto.UINT64: Datatype.UINT64, TensorProto.INT8: Datatype.INT8,
    TensorProto.INT16: Datatype.INT16, TensorProto.INT32: Datatype.INT32, TensorProto.INT64: Datatype.INT64,
    TensorProto.FLOAT16: Datatype.FP16, TensorProto.FLOAT: Datatype.FP32, TensorProto.DOUBLE: Datatype.FP64,
    TensorProto.BFLOAT16: Datatype.BF16, TensorProto.STRING: Datatype.BYTES,
}  # fmt: skip
_PRECISIONS = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
_MOST_ELEMENTS = 2**31 - 1
_QUANTIZED = ("DynamicQuantize", "QuantizeLinear", "QLinear", "MatMulInteger", "ConvInteger", "QGemm")
_SAME_VALUES = {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}


def inspect_onnx(path: Path) -> ModelSignature:
    """Raises BuildError: it is no ONNX model, may not be loaded, or takes or gives what is no tensor."""
    return signature_of(load_onnx(path).graph, path)


def signature_of(graph: Any, path: Path) -> ModelSignature:
    """The signature of a graph that was read from `path`. Raises BuildError."""
    weights = {weight.name for weight in graph.initializer}
    return ModelSignature(
        source=path.name,
        inputs=tuple(
            _port(path, value, _bounds(graph, value.name)) for value in graph.input if value.name not in weights
        ),
        outputs=tuple(_port(path, value, None) for value in graph.output),
        precision=_precision(graph),
    )


def is_quantized(graph: Any) -> bool:
    """Whether an operator of the graph, or of a branch or loop in it, computes in integers or converts from them."""
    return any(
        node.op_type.startswith(_QUANTIZED)
        or any(is_quantized(inner) for one in node.attribute for inner in (one.g, *one.graphs) if inner.node)
        for node in graph.node
    )


def _port(path: Path, value: Any, bounds: Bounds | None) -> SignaturePort:
    tensor = value.type.tensor_type
    if value.type.WhichOneof("value") in ("sequence_type", "map_type"):
        raise BuildError(
            f"{path}: {value.name!r} is a sequence or a map, and requests and answers are made of tensors: export it "
            "without (skl2onnx: options={'zipmap': False})"
        )
    if tensor.elem_type not in _DATATYPES:
        raise BuildError(f"{path}: {value.name!r} is not a tensor of a type that the protocol knows")
    if prod(one.dim_value for one in tensor.shape.dim if one.dim_value > 0) > _MOST_ELEMENTS:
        raise BuildError(f"{path}: {value.name!r} has more than {_MOST_ELEMENTS} elements, which no request can hold")
    return SignaturePort(value.name, _DATATYPES[tensor.elem_type], tuple(map(_dimension, tensor.shape.dim)), bounds)


def _dimension(dimension: Any) -> Dimension:
    if dimension.HasField("dim_value") and dimension.dim_value > 0:
        return int(dimension.dim_value)
    return dimension.dim_param or None


def _bounds(graph: Any, name: str) -> Bounds | None:
    """The bounds from the shortest table that is indexed with the values of `name`; None if there is none."""
    lengths = {weight.name: tuple(weight.dims) for weight in graph.initializer}
    carriers, found = {name}, []
    for node in graph.node:  # nodes are in topological order
        if node.op_type == "Gather" and node.input[1] in carriers and lengths.get(node.input[0]):
            axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
            found.append(lengths[node.input[0]][axis])
        elif node.op_type == "DequantizeLinear" and node.input[0] in lengths:
            lengths[node.output[0]] = lengths[node.input[0]]  # a quantized table is still that table
        elif node.op_type in _SAME_VALUES and node.input[0] in carriers:
            carriers.update(node.output)
    return Bounds(0, min(found) - 1) if found else None


def _precision(graph: Any) -> str:
    if is_quantized(graph):
        return "int8"
    elements: Counter[str] = Counter()
    for weight in graph.initializer:
        elements[_PRECISIONS.get(weight.data_type, "")] += prod(weight.dims)
    elements.pop("", None)
    return elements.most_common(1)[0][0] if elements else "fp32"

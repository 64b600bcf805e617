"""The signature of an exported program: names, types, dimensions with their ranges, precision, bounds of lookups.

Outputs have no names in a program, so their names are left empty, for the ONNX artefact beside it or the user to give.
TorchScript holds no shapes and no datatypes at all; a TorchScript artefact is described by the ONNX file beside it and
is then checked by running it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tidegate.engines.errors import UntrustedProgram
from tidegate.engines.torch import load_program
from tidegate.models.manifest import Bounds
from tidegate.models.trusted_digests import TrustedDigests
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.inspect.signature import Dimension, ModelSignature, SignaturePort
from tidegate.types import Datatype

_DATATYPES = {
    torch.bool: Datatype.BOOL, torch.uint8: Datatype.UINT8, torch.int8: Datatype.INT8, torch.int16: Datatype.INT16,
    torch.int32: Datatype.INT32, torch.int64: Datatype.INT64, torch.float16: Datatype.FP16,
    torch.float32: Datatype.FP32, torch.float64: Datatype.FP64, torch.bfloat16: Datatype.BF16,
}  # fmt: skip
_PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def inspect_program(path: Path, trusted: TrustedDigests) -> ModelSignature:
    """Raises BuildError: the file is no exported program, or takes or gives something that is no tensor."""
    try:
        program = load_program(path, trusted)
    except UntrustedProgram as error:
        raise BuildError(str(error)) from error
    except Exception as error:  # a zip's, a pickle's or torch's own errors
        raise BuildError(f"{path}: is not an exported program (torch.export.save): {error}") from error
    given = set(program.graph_signature.user_inputs)
    holders = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in given]
    (returned,) = (node.args[0] for node in program.graph.nodes if node.op == "output")
    users = [node for node in returned if getattr(node, "name", None) in program.graph_signature.user_outputs]
    names = _output_names(program, len(users))
    return ModelSignature(
        source=path.name,
        inputs=tuple(_port(path, node.name, node, _bounds(program, node)) for node in holders),
        outputs=tuple(_port(path, name, node, None) for name, node in zip(names, users, strict=True)),
        precision=_precision(program),
        ranges={str(symbol): _range(limits) for symbol, limits in program.range_constraints.items()},
    )


def _output_names(program: Any, count: int) -> list[str]:
    """A program that returns a dict does name its outputs: by the dict's keys."""
    spec = program.call_spec.out_spec
    keys = list(spec.context) if spec is not None and spec.type is dict else []
    return [str(key) for key in keys] if len(keys) == count else [""] * count


def _port(path: Path, name: str, node: Any, bounds: Bounds | None) -> SignaturePort:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in _DATATYPES:
        raise BuildError(f"{path}: {node.name!r} is not a tensor of a type that the protocol knows")
    return SignaturePort(name, _DATATYPES[value.dtype], tuple(map(_dimension, value.shape)), bounds)


def _dimension(length: Any) -> Dimension:
    return length if isinstance(length, int) else str(length)


def _range(limits: Any) -> tuple[int, int | None]:
    upper = limits.upper
    # int_oo, torch's integer infinity, is not an Integer; beyond 2**31 - 1 no one means a limit.
    most = int(upper) if getattr(upper, "is_Integer", False) and int(upper) < 2**31 - 1 else None
    return max(0, int(limits.lower)), most


def _bounds(program: Any, holder: Any) -> Bounds | None:
    """The bounds from the shortest embedding table that is indexed with the input; None if there is none."""
    lengths = [
        node.args[0].meta["val"].shape[0]
        for node in program.graph.nodes
        if node.op == "call_function" and node.target is torch.ops.aten.embedding.default and node.args[1] is holder
    ]
    return Bounds(0, min(lengths) - 1) if lengths else None


def _precision(program: Any) -> str:
    elements: Counter[str] = Counter()
    for weight in program.state_dict.values():
        elements[_PRECISIONS.get(weight.dtype, "")] += weight.numel()
    elements.pop("", None)
    return elements.most_common(1)[0][0] if elements else "fp32"

"""Manifests for tests: a small text model, and variations of any."""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.models.manifest import Axis, Batching, Cost, Manifest, TensorSpec, Variant
from tidegate.types import Datatype

TEXT = Manifest(
    name="text",
    version="1",
    inputs=(
        TensorSpec("ids", Datatype.INT64, ("batch", "sequence")),
        TensorSpec("mask", Datatype.INT64, ("batch", "sequence")),
    ),
    outputs=(
        TensorSpec("sum", Datatype.FP32, ("batch", 1)),
        TensorSpec("twice", Datatype.INT64, ("batch", "sequence")),
    ),
    variants=(Variant("fp32", "text.onnx", "onnx", "fp32", ("pool",), "0" * 64, 1),),
    cost=Cost("tokens", "ids"),
    axes={"batch": Axis(), "sequence": Axis(1, 256)},
    batching=Batching(max_batch_size=8, max_queue_size=16, pad_axis="sequence"),
)


def manifest_of(manifest: Manifest = TEXT, **changes: Any) -> Manifest:
    """A manifest with some fields changed. The cost input is the first input, unless it is named."""
    inputs = changes.get("inputs", manifest.inputs)
    if "cost" not in changes and manifest.cost.input not in {spec.name for spec in inputs}:
        changes["cost"] = Cost(manifest.cost.feature, inputs[0].name)
    return msgspec.structs.replace(manifest, **changes)

"""A foreign server's own description of a model, as one of our manifests.

OIP's metadata names inputs and outputs with shapes, -1 where a length is free; Triton's configuration adds the
largest batch. That is less than a manifest of ours says: no bounds on values, no precision, no measured quality. What
is unknown is left open: every free length is an axis of its own, except the batch axis, which Triton demands to be
shared.

Work is counted in bytes, the only feature that every request has.
"""

from __future__ import annotations

from typing import Final

from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.models.manifest import Axis, Batching, Cost, Manifest, TensorSpec, Variant
from tidegate.outcome import BadAnswer
from tidegate.rpc import oip_pb2
from tidegate.types import Datatype

VARIANT: Final = "default"
PRECISION: Final = "unknown"


def manifest_from(metadata: oip_pb2.ModelMetadataResponse, config: oip_pb2.ModelConfig) -> Manifest:
    """Raises BadAnswer for a model that cannot be served: no input, no output, an unknown datatype."""
    if not metadata.name or not metadata.inputs or not metadata.outputs:
        raise BadAnswer(f"{metadata.name or 'a model'} is described without a name, inputs or outputs")
    axes: dict[str, Axis] = {}
    max_batch_size = max(config.max_batch_size, 0)
    inputs = tuple([_spec(entry, max_batch_size, axes) for entry in metadata.inputs])
    return Manifest(
        name=metadata.name,
        version=max(metadata.versions, key=_version_key, default="1"),
        inputs=inputs,
        outputs=tuple([_spec(entry, max_batch_size, axes) for entry in metadata.outputs]),
        variants=(
            Variant(
                name=VARIANT,
                artefact="",
                engine="onnx",
                precision=PRECISION,
                where=("edge", "pool"),
                sha256="",
                size_bytes=0,
            ),
        ),
        cost=Cost("bytes", inputs[0].name),
        axes=axes,
        summary=f"served by {metadata.platform or 'a foreign server'}",
        max_batch_size=max_batch_size,
        batching=Batching(max_batch_size=max(max_batch_size, 1)),
    )


def offer_of(manifest: Manifest) -> ModelOffer:
    """What a target that serves this model offers; nothing of its cost is known before requests have been timed."""
    return ModelOffer(manifest.name, manifest.version, (VariantOffer(VARIANT, PRECISION),))


def _spec(
    entry: oip_pb2.ModelMetadataResponse.TensorMetadata, max_batch_size: int, axes: dict[str, Axis]
) -> TensorSpec:
    try:
        datatype = Datatype(entry.datatype)
    except ValueError as exc:
        raise BadAnswer(f"{entry.name} has the unknown datatype {entry.datatype!r}") from exc
    return TensorSpec(entry.name, datatype, tuple(_dimensions(entry, max_batch_size, axes)))


def _dimensions(
    entry: oip_pb2.ModelMetadataResponse.TensorMetadata, max_batch_size: int, axes: dict[str, Axis]
) -> list[int | str]:
    dimensions: list[int | str] = []
    for position, length in enumerate(entry.shape):
        if length >= 0:
            dimensions.append(length)
            continue
        shared = max_batch_size > 0 and position == 0
        axis = "batch" if shared else f"{entry.name}.{position}"
        axes[axis] = Axis(1, max_batch_size) if shared else Axis(0)
        dimensions.append(axis)
    return dimensions


def _version_key(version: str) -> tuple[int, str]:
    return (int(version) if version.isdecimal() else -1, version)

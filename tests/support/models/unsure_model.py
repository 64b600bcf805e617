"""A classifier of two variants whose better one sees more: repositories for a device and for whoever stands behind it.

`kinds` scores four classes of float32[batch, 8] by the features that belong to each. int8 reads the first two features
only, so of what differs in the others it is sure of nothing; fp32 reads all.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from tests.support.models.tiny_models import classifier
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Confidence, Cost, Manifest, Quality, TensorSpec, Unsure, Variant, Where
from tidegate.models.repository import save_manifest
from tidegate.types import Datatype

SURE = [[9.0, 0, 0, 0, 0, 0, 0, 0]]
UNSURE = [[0, 0, 0, 9.0, 0, 0, 0, 0]]  # of class 3, which int8 does not see


def kinds_repository(root: Path, *, unsure: Unsure = "defer") -> Path:
    """`root` with the model as a fleet knows it: int8 for edges, fp32 for a pool."""
    folder = _folder(root)
    variants = _variant(folder, "int8", 2, 0.7, "edge"), _variant(folder, "fp32", 8, 0.99, "pool")
    save_manifest(folder, replace(kinds_manifest(variants), confidence=_confidence(unsure)))
    return root


def better_repository(root: Path) -> Path:
    """`root` with the better variant alone, for an edge agent that stands in for a pool."""
    folder = _folder(root)
    save_manifest(folder, kinds_manifest((_variant(folder, "fp32", 8, 0.99, "edge"),)))
    return root


def _folder(root: Path) -> Path:
    folder = root / "kinds" / "1"
    folder.mkdir(parents=True)
    return folder


def kinds_manifest(variants: tuple[Variant, ...]) -> Manifest:
    return Manifest(
        name="kinds",
        version="1",
        inputs=(TensorSpec("x", Datatype.FP32, ("batch", 8)),),
        outputs=(TensorSpec("scores", Datatype.FP32, ("batch", 4)),),
        variants=variants,
        cost=Cost("items", "x"),
        axes={"batch": Axis(1, 16)},
    )


def _confidence(unsure: Unsure) -> Confidence:
    return Confidence("scores", "margin", 0.5, softmax=True, unsure=unsure)


def _variant(folder: Path, name: str, features: int, quality: float, where: Where) -> Variant:
    path = classifier(folder / f"{name}.onnx", features=features)
    return Variant(
        name=name,
        artefact=path.name,
        engine="onnx",
        precision=name,
        where=(where,),
        sha256=sha256_of(path),
        size_bytes=path.stat().st_size,
        quality=Quality("top1", quality, 1000),
    )

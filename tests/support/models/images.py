"""Models that take files of images: the demo's digits behind the step `image_decode`, and real digits as files."""

from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from PIL import Image

from tidegate.models.manifest import Cost, Manifest, Pipeline, TensorSpec
from tidegate.models.repository import Repository, save_manifest
from tidegate.models.steps import ImageDecodeStep
from tidegate.types import Datatype

NAME: Final = "digit-files"
Pixels = NDArray[np.uint8]


def add_digit_files(root: Path, **keys: Any) -> Manifest:
    """Put a second model of the digits' artefacts into their repository, for files; `keys` are the step's."""
    repository = Repository(root)
    digits = repository.manifest("digits")
    folder = root / NAME / "1"
    shutil.copytree(repository.folder(digits), folder)
    (pixels,) = digits.inputs
    step = ImageDecodeStep(
        ("file",),
        (pixels.name,),
        **({"height": 8, "width": 8, "channels": "L", "layout": "nchw", "scale": 1 / 255} | keys),
    )
    pipeline = Pipeline(digits.inputs, digits.outputs, digits.cost, before=(step,))
    file = TensorSpec("file", Datatype.BYTES, ("batch",))
    manifest = replace(
        digits, name=NAME, version="1", inputs=(file,), cost=Cost("pixels", "file"), pipeline=pipeline, confidence=None
    )
    save_manifest(folder, manifest)
    return manifest


def scanned_digits(count: int) -> list[Pixels]:
    """Scans of scikit-learn's `load_digits`, uint8[8, 8], from 0 (paper) to 255 (ink)."""
    from sklearn.datasets import load_digits

    images = load_digits().images[:count]
    return [np.round(one * (255 / 16)).astype(np.uint8) for one in images]


def as_file(pixels: NDArray[Any] | Image.Image, kind: str = "PNG", **keys: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    saved = BytesIO()
    image.save(saved, kind, **keys)
    return saved.getvalue()


def as_tensor(*files: bytes) -> NDArray[Any]:
    array = np.empty(len(files), object)
    array[:] = files
    return array

"""Steps on images: raw pixels to the size and the scale that a model was trained with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.models.steps import ImageDecodeStep, NormaliseStep, ResizeStep

Image = NDArray[np.float32]


def resize(step: ResizeStep, images: NDArray[Any]) -> Image:
    """Images uint8 or float32[rows, height, width, channels], as float32 of the step's height and width.

    Linear between the centres of pixels, without smoothing before an image is made smaller: as ONNX's Resize with
    `linear` and `half_pixel`.
    """
    above, below, down = _places(images.shape[1], step.height)
    left, right, across = _places(images.shape[2], step.width)
    # Rows first: of those that are not needed no column is looked at.
    upper, lower = images[:, above].astype(np.float32), images[:, below].astype(np.float32)
    rows = upper + (lower - upper) * down[None, :, None, None]
    begin, end = rows[:, :, left], rows[:, :, right]
    return np.ascontiguousarray(begin + (end - begin) * across[None, None, :, None], np.float32)


def _places(size: int, wanted: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Of each wanted pixel: the two pixels around its centre, and how far it is from the first to the second."""
    centre = (np.arange(wanted) + 0.5) * (size / wanted) - 0.5
    centre = np.clip(centre, 0.0, size - 1.0)
    first = np.floor(centre).astype(np.int64)
    return first, np.minimum(first + 1, size - 1), (centre - first).astype(np.float32)


def normalise(step: NormaliseStep | ImageDecodeStep, images: NDArray[Any]) -> Image:
    """`(x * scale - mean) / std` of uint8 or float32[rows, height, width, channels], in the step's layout."""
    # One multiplication and one addition a pixel: x * (scale / std) - mean / std.
    std = np.asarray(step.std, np.float32)
    factor = (np.float32(step.scale) / std).astype(np.float32)
    offset = (np.asarray(step.mean, np.float32) / std).astype(np.float32)
    scaled = images.astype(np.float32) * factor - offset
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2) if step.layout == "nchw" else scaled, np.float32)

"""Inputs that a model accepts, made up from its manifest: for warm-up, for measuring cost, for checking an artefact.

The values mean nothing, but they are valid: inside the bounds, of the right type, with axes of the asked-for lengths.
What looks like a mask (integers or booleans from 0 to 1) is all ones, so that the work is real and not masked away.
Optional inputs are left out. The same arguments always give the same arrays.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from math import ceil, floor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.models.manifest import Bounds, Manifest, TensorSpec
from tidegate.types import Datatype

_PNG: Final = b"\x89PNG\r\n\x1a\n"  # how each file begins
_WORD = b"the "  # one token of most vocabularies of English, and the four bytes that `work.py` takes one for


def example_arrays(manifest: Manifest, lengths: Mapping[str, int], seed: int = 0) -> dict[str, NDArray[Any]]:
    """One array per required input; axes that `lengths` does not name have their smallest length.

    Raises:
        ValueError: `lengths` names an axis that the manifest does not have, or a length that it does not allow.
    """
    sizes = _sizes(manifest, lengths)
    random = np.random.default_rng(seed)
    return {
        spec.name: _values(
            spec,
            tuple(sizes[entry] if isinstance(entry, str) else entry for entry in spec.shape),
            random,
            content=_content_for(manifest, spec, sizes),
        )
        for spec in manifest.inputs
        if not spec.optional or (manifest.sequence is not None and spec.name in manifest.sequence.state_inputs)
    }


def least_lengths(manifest: Manifest) -> dict[str, int]:
    """The shortest lengths at which no input is empty, where an axis may have none: an empty answer tells nothing."""
    return {name: max(1, axis.min) for name, axis in manifest.axes.items() if axis.max >= 1}


def _sizes(manifest: Manifest, lengths: Mapping[str, int]) -> dict[str, int]:
    for name, length in lengths.items():
        axis = manifest.axes.get(name)
        if axis is None:
            raise ValueError(
                f"model {manifest.name!r} has no axis {name!r} (axes: {', '.join(manifest.axes) or 'none'})"
            )
        if not axis.min <= length <= axis.max:
            raise ValueError(f"axis {name!r} of {manifest.name!r} goes from {axis.min} to {axis.max}, not to {length}")
    return {name: lengths.get(name, axis.min) for name, axis in manifest.axes.items()}


def _content_for(manifest: Manifest, spec: TensorSpec, sizes: Mapping[str, int]) -> bytes:
    """An element of BYTES: an image where a pipeline decodes it, and else a text.

    A text becomes about as many tokens as the axis of its token ids is long, where a pipeline makes them. An image has
    twice the sides of what it becomes, where the step takes that: most are larger than their model.
    """
    if manifest.pipeline is None or spec.datatype is not Datatype.BYTES:
        return b"example"
    decode = manifest.pipeline.decoding(spec.name)
    if decode is not None:
        rows = max(1, *sizes.values()) if sizes else 1
        larger = 2 if 4 * rows * decode.height * decode.width <= decode.max_pixels else 1
        return grey_png(larger * decode.height, larger * decode.width)
    step = manifest.pipeline.tokenizing(spec.name)
    if step is None:
        return b"example"
    ids = next((one for one in manifest.pipeline.inputs if one.name == step.outputs[0]), None)
    length = ids.shape[-1] if ids is not None else 1
    return _WORD * min(sizes[length] if isinstance(length, str) else length, step.max_tokens)


def grey_png(height: int, width: int) -> bytes:
    """A file of PNG, 8 bits of grey a pixel, from dark to light. Source: the PNG specification, 5.3 and 11.2."""
    rows = (np.arange(height)[:, None] + np.arange(width)[None, :]).astype(np.uint8)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)  # each begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    return _PNG + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def _values(
    spec: TensorSpec, shape: tuple[int, ...], random: np.random.Generator, *, content: bytes = b"example"
) -> NDArray[Any]:
    if spec.datatype is Datatype.BYTES:
        return np.full(shape, content, dtype=object)
    if spec.datatype is Datatype.BOOL:
        return np.ones(shape, dtype=bool)
    if spec.datatype is Datatype.BF16:
        # numpy has no bfloat16: its bits are the upper half of a float32's.
        return (_floats(spec.bounds, shape, random).astype("<f4").view("<u4") >> 16).astype("<u2")
    if spec.datatype in {Datatype.FP16, Datatype.FP32, Datatype.FP64}:
        return _floats(spec.bounds, shape, random).astype(spec.datatype.numpy_name)
    return _integers(spec.bounds, shape, random).astype(spec.datatype.numpy_name)


def _floats(bounds: Bounds | None, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float64]:
    if bounds is None:
        return random.standard_normal(shape)
    # Not uniform(min, max): max - min may be more than a float holds, and rounding must not leave the bounds.
    part = random.random(shape)
    return np.clip(bounds.min * (1.0 - part) + bounds.max * part, bounds.min, bounds.max)


def _integers(bounds: Bounds | None, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[Any]:
    if bounds is None:
        return np.zeros(shape, dtype=np.int64)  # the only index or id that every model surely knows
    lowest, highest = ceil(bounds.min), floor(bounds.max)
    if (lowest, highest) == (0, 1):
        return np.ones(shape, dtype=np.int64)
    # Bounds of the widest types are floats that round past 2**63; half the range is example enough.
    return random.integers(max(lowest, -(2**62)), min(highest, 2**62), size=shape, endpoint=True)

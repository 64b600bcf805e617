"""The golden probe compares the answers of a generation with known answers, within given tolerances.

The cases are one artefact: a few inputs and the outputs that the model gave where it was made, with the same engine
and precision where that can be. Three bounds, each for another kind of model: `atol` for regressors, `cosine_min` for
embeddings, `top1_min` for classifiers. An output that is missing, has another shape, or is not finite where the
expected one is, fails whichever bound is given.

Written in msgpack with raw tensors: nothing in it is ever run, and its size is the size of what it decodes to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.outcome import InvalidRequest
from tidegate.rollout.plan import Probe
from tidegate.types import Datatype, Tensor

MAX_GOLDEN_BYTES: Final = 64 * 1024 * 1024
Arrays = Mapping[str, NDArray[Any]]


class BadGolden(ValueError):
    """An artefact that holds no cases; the text says why."""


class GoldenTensor(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    datatype: Datatype
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=8)]
    raw: bytes


class Case(msgspec.Struct, frozen=True):
    inputs: Annotated[tuple[GoldenTensor, ...], Meta(min_length=1, max_length=64)]
    outputs: Annotated[tuple[GoldenTensor, ...], Meta(min_length=1, max_length=64)]


class Golden(msgspec.Struct, frozen=True):
    cases: Annotated[tuple[Case, ...], Meta(min_length=1, max_length=1024)]
    v: Literal[1] = 1


_decoder: Final = msgspec.msgpack.Decoder(Golden)


def encode_golden(cases: Sequence[tuple[Arrays, Arrays]], datatypes: Mapping[str, Datatype]) -> bytes:
    """The artefact of these (inputs, outputs); `datatypes` by tensor name."""
    made = tuple(Case(_tensors(inputs, datatypes), _tensors(outputs, datatypes)) for inputs, outputs in cases)
    return msgspec.msgpack.encode(Golden(made))


def decode_golden(raw: bytes) -> tuple[tuple[Arrays, Arrays], ...]:
    """(inputs, expected outputs) of each case. Raises BadGolden."""
    if len(raw) > MAX_GOLDEN_BYTES:
        raise BadGolden(f"{len(raw)} bytes of golden cases, at most {MAX_GOLDEN_BYTES} are allowed")
    try:
        golden = _decoder.decode(raw)
        return tuple((_arrays(case.inputs), _arrays(case.outputs)) for case in golden.cases)
    except (msgspec.MsgspecError, InvalidRequest, RecursionError, UnicodeError, ValueError) as error:
        raise BadGolden(f"no golden cases: {error}") from error


def inaccuracy(probe: Probe, expected: Sequence[Arrays], got: Sequence[Arrays]) -> str:
    """Why the answers are not near enough to the expected ones, "" when they are."""
    right = rows = 0
    for number, (wanted, given) in enumerate(zip(expected, got, strict=True), start=1):
        for name, reference in wanted.items():
            answer = given.get(name)
            if answer is None or answer.shape != reference.shape:
                shape = "missing" if answer is None else f"of shape {list(answer.shape)}"
                return f"case {number}: output {name!r} is {shape}, expected {list(reference.shape)}"
            if reference.dtype.kind not in "fiub":
                if not np.array_equal(answer, reference):
                    return f"case {number}: output {name!r} differs"
                continue
            if why := _too_far(probe, reference.astype(np.float64), answer.astype(np.float64)):
                return f"case {number}: output {name!r} {why}"
            if reference.ndim:
                agree = np.argmax(answer, axis=-1) == np.argmax(reference, axis=-1)
                right, rows = right + int(np.sum(agree)), rows + int(np.size(agree))
    if probe.top1_min is not None and rows and right / rows < probe.top1_min:
        return f"top-1 agreement {right / rows:.4f} of {rows} rows is below {probe.top1_min:g}"
    return ""


def _too_far(probe: Probe, reference: NDArray[np.float64], answer: NDArray[np.float64]) -> str:
    if not np.array_equal(np.isfinite(reference), np.isfinite(answer)):
        return "has infinities or NaN in other places than expected"
    finite = np.isfinite(reference)
    reference, answer = np.where(finite, reference, 0.0), np.where(finite, answer, 0.0)
    apart = float(np.max(np.abs(reference - answer), initial=0.0))
    if probe.atol is not None and apart > probe.atol:
        return f"is off by {apart:.4g}, more than {probe.atol:g} (atol)"
    if probe.cosine_min is not None and (cosine := _least_cosine(reference, answer)) < probe.cosine_min:
        return f"has cosine {cosine:.4f} to the expected, below {probe.cosine_min:g} (cosine_min)"
    return ""


def _least_cosine(reference: NDArray[np.float64], answer: NDArray[np.float64]) -> float:
    """Of the rows along the last axis; two rows of zeros are alike."""
    width = reference.shape[-1] if reference.ndim else 1
    if not reference.size:
        return 1.0
    left, right = reference.reshape(-1, width), answer.reshape(-1, width)
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    same = np.linalg.norm(left - right, axis=1) == 0.0
    products = np.sum(left * right, axis=1)
    return float(np.min(np.where(lengths > 0.0, products / np.where(lengths > 0.0, lengths, 1.0), same)))


def _tensors(arrays: Arrays, datatypes: Mapping[str, Datatype]) -> tuple[GoldenTensor, ...]:
    tensors = (array_to_tensor(name, array, datatypes[name]) for name, array in arrays.items())
    return tuple(GoldenTensor(one.name, one.datatype, one.shape, bytes(one.raw)) for one in tensors)


def _arrays(tensors: Sequence[GoldenTensor]) -> Arrays:
    return {one.name: tensor_to_array(Tensor(one.name, one.datatype, one.shape, one.raw)) for one in tensors}

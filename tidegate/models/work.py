"""Computes the work of a request (cost feature, rows, longest row, answer size) from shapes alone.

No tensor is decoded: the gateway prices a request it only passes on.
"""

from __future__ import annotations

from math import prod
from typing import Final, NamedTuple

from tidegate.models.manifest import Feature, Manifest
from tidegate.types import InferRequest, Tensor

_TEXT_BYTES: Final = 16  # of one BYTES element, whose length is not known in advance


class Work(NamedTuple):
    """`units` in the manifest's cost feature; `rows` is the first axis of the cost input and `longest_row` its last."""

    units: float
    rows: int
    longest_row: int


def work_of(manifest: Manifest, request: InferRequest) -> Work:
    """The work of a request that was checked against `manifest`; a missing cost input counts as one unit."""
    cost = manifest.cost
    for tensor in request.inputs:
        if tensor.name == cost.input:
            shape = tensor.shape or (1,)
            return Work(float(_units(cost.feature, tensor, shape)), shape[0], shape[-1] if len(shape) > 1 else 1)
    return Work(units=1.0, rows=1, longest_row=1)


def _units(feature: Feature, tensor: Tensor, shape: tuple[int, ...]) -> int:
    if feature == "bytes":
        return len(tensor.raw)
    return shape[0] if feature == "items" else prod(shape)


def answer_bytes(manifest: Manifest, request: InferRequest) -> int:
    """The size of the answer, as far as the manifest and the request's axes fix it; an axis of its own counts once."""
    lengths: dict[str, int] = {}
    shapes = {tensor.name: tensor.shape for tensor in request.inputs}
    for spec in manifest.inputs:
        for entry, length in zip(spec.shape, shapes.get(spec.name, ()), strict=False):
            if isinstance(entry, str):
                lengths[entry] = length
    wanted = {output.name for output in request.outputs}
    return sum(
        (spec.datatype.itemsize or _TEXT_BYTES)
        * prod(entry if isinstance(entry, int) else lengths.get(entry, 1) for entry in spec.shape)
        for spec in manifest.outputs
        if not wanted or spec.name in wanted
    )


def fits(work: Work, *, max_batch: int | None, max_tokens: int | None) -> bool:
    """Whether a variant with these limits takes the work; None means no limit."""
    return (max_batch is None or work.rows <= max_batch) and (max_tokens is None or work.longest_row <= max_tokens)

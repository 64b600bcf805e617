"""Whether the halves of a cut fit each other and their whole: what one gives is what the other takes.

A gateway sends the head the whole's inputs, and the tail what the head gave, with those of the whole's inputs that the
tail takes as well. A half that is not in the repository is no problem: an edge has heads, a pool has tails.

Pure. It can be wrong where tensors agree in name and shape and halves were cut from different weights; both halves are
made by one command, in one version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tidegate.models.manifest import Manifest, TensorSpec
from tidegate.models.split.layer_split import SplitCut


class CutHalves(NamedTuple):
    """A cut with the manifests of its halves."""

    cut: SplitCut
    head: Manifest
    tail: Manifest


def halves_problems(manifests: Iterable[Manifest]) -> Iterator[str]:
    """What keeps the halves that are there from being used, as `MODEL VERSION: split.cuts[N]: what`."""
    every = {(one.name, one.version): one for one in manifests}
    for whole in every.values():
        for index, cut in enumerate(() if whole.split is None else whole.split.cuts):
            where = f"{whole.name} {whole.version}: split.cuts[{index}]"
            for problem in _cut_problems(whole, cut, every):
                yield f"{where}.{problem}"


def whole_halves(whole: Manifest, head: Manifest | None, tail: Manifest | None, cut: SplitCut) -> CutHalves | None:
    """The cut with its halves where both are there and fit; None otherwise."""
    if head is None or tail is None or any(_misfits(whole, head, tail)):
        return None
    if not (_is_half_of(whole, head, "head") and _is_half_of(whole, tail, "tail")):
        return None
    return CutHalves(cut, head, tail)


def _cut_problems(whole: Manifest, cut: SplitCut, every: dict[tuple[str, str], Manifest]) -> Iterator[str]:
    head, tail = every.get((cut.head, whole.version)), every.get((cut.tail, whole.version))
    for role, half in (("head", head), ("tail", tail)):
        if half is not None and not _is_half_of(whole, half, role):
            yield f"{role}: {half.name!r} does not say in its key `half` that it is the {role} of {whole.name!r}"
    if head is not None and tail is not None:
        yield from _misfits(whole, head, tail)


def _is_half_of(whole: Manifest, half: Manifest, role: str) -> bool:
    return half.half is not None and (half.half.of, half.half.role) == (whole.name, role)


def _misfits(whole: Manifest, head: Manifest, tail: Manifest) -> Iterator[str]:
    own, given = _by_name(whole.inputs), _by_name(head.outputs)
    for spec in head.inputs:
        if own.get(spec.name) != spec:
            yield f"head: {head.name!r} takes {spec.name!r} as the whole does not"
    for spec in tail.inputs:
        source = given.get(spec.name) or own.get(spec.name)
        if source is None or (source.datatype, source.shape) != (spec.datatype, spec.shape):
            yield f"tail: {tail.name!r} takes {spec.name!r}, which neither the head gives nor the whole takes"
    if tail.outputs != whole.outputs:
        yield f"tail: {tail.name!r} gives other outputs than the whole"
    if whole.cost.input in _by_name(tail.inputs):
        yield f"tail: {tail.name!r} takes {whole.cost.input!r}, the raw input, which a head is there to keep"


def _by_name(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in specs}

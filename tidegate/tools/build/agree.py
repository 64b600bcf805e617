"""`agreed_signature` checks that two artefacts are the same model for its callers, and joins their axes.

They must take the same inputs and give the same number of outputs, of the same datatypes and ranks; a fixed length must
be the same in both. A dimension of an input that varies in one must vary in the other too, because the manifest makes
one promise for all variants.

Axes are found by union: two dimensions are one axis if any artefact gives them one symbol. Its range is what all
artefacts allow. It is named by the first ONNX symbol in it, since torch's symbols are numbers; the first dimension of
an input is called `batch` when nothing names it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.models.manifest import Bounds, TensorSpec
from tidegate.tools.build.inspect.signature import Dimension, ModelSignature, SignaturePort

_Place = tuple[str, int, int]  # "inputs" or "outputs", which tensor, which dimension
_TORCH_SYMBOL = re.compile(r"[su]\d+")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class AgreedSignature:
    """`axes` maps each axis to its least and largest length; None where no artefact limits it."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: dict[str, tuple[int, int | None]]


def disagreements(signatures: Sequence[ModelSignature]) -> tuple[str, ...]:
    """What keeps the artefacts from being one model; empty when nothing does."""
    first, found = signatures[0], []
    for other in signatures[1:]:
        found += _input_names(first, other)
        if len(first.outputs) != len(other.outputs):
            found.append(
                f"{first.source} gives {len(first.outputs)} outputs, but {other.source} gives {len(other.outputs)}"
            )
        if found:
            continue  # comparing tensors that are not the same ones would only confuse
        for port in first.inputs:
            found += _ports(f"input {port.name!r}", first, port, other, _named(other, port.name), strict=True)
        for index, (port, twin) in enumerate(zip(first.outputs, other.outputs, strict=True)):
            found += _ports(f"output {port.name or index!r}", first, port, other, twin, strict=False)
    return tuple(found)


def agreed_signature(signatures: Sequence[ModelSignature], output_names: Sequence[str] = ()) -> AgreedSignature:
    """The model that artefacts without disagreements describe together. `output_names` rename the outputs, in order."""
    ordered = [_in_order(signatures[0], signature) for signature in signatures]
    groups = _groups(ordered)
    names = _axis_names(ordered, groups)
    first = ordered[0]
    inputs = tuple(
        TensorSpec(port.name, port.datatype, _shape("inputs", at, ordered, groups, names), bounds=_bounds(at, ordered))
        for at, port in enumerate(first.inputs)
    )
    outputs = tuple(
        TensorSpec(name, port.datatype, _shape("outputs", at, ordered, groups, names))
        for at, (port, name) in enumerate(zip(first.outputs, _output_names(ordered, output_names), strict=True))
    )
    used = {entry for spec in (*inputs, *outputs) for entry in spec.shape if isinstance(entry, str)}
    ranges = {names[root]: _range(root, ordered, groups) for root in names if names[root] in used}
    return AgreedSignature(inputs, outputs, ranges)


def _input_names(first: ModelSignature, other: ModelSignature) -> list[str]:
    names, others = {port.name for port in first.inputs}, {port.name for port in other.inputs}
    if names == others:
        return []
    return [f"{first.source} takes {', '.join(sorted(names))}, but {other.source} takes {', '.join(sorted(others))}"]


def _ports(
    what: str, first: ModelSignature, port: SignaturePort, other: ModelSignature, twin: SignaturePort, *, strict: bool
) -> list[str]:
    if port.datatype is not twin.datatype:
        return [f"{what} is {port.datatype.value} in {first.source}, but {twin.datatype.value} in {other.source}"]
    if len(port.shape) != len(twin.shape):
        return [f"{what} has {len(port.shape)} dimensions in {first.source}, but {len(twin.shape)} in {other.source}"]
    return [
        f"{what}, dimension {at}: {_word(one)} in {first.source}, but {_word(two)} in {other.source}"
        for at, (one, two) in enumerate(zip(port.shape, twin.shape, strict=True))
        # Exporters often forget the fixed lengths of outputs, so there only two different lengths disagree.
        if one != two and ((isinstance(one, int) and isinstance(two, int)) or (strict and _is_one_fixed(one, two)))
    ]


def _is_one_fixed(one: Dimension, two: Dimension) -> bool:
    return isinstance(one, int) != isinstance(two, int)


def _word(dimension: Dimension) -> str:
    return f"fixed to {dimension}" if isinstance(dimension, int) else "variable"


def _named(signature: ModelSignature, name: str) -> SignaturePort:
    return next(port for port in signature.inputs if port.name == name)


def _in_order(first: ModelSignature, other: ModelSignature) -> ModelSignature:
    """`other` with its inputs in the order of `first`, so that places mean the same in both."""
    inputs = tuple(_named(other, port.name) for port in first.inputs)
    return ModelSignature(other.source, inputs, other.outputs, other.precision, other.ranges)


def _places(signature: ModelSignature) -> dict[_Place, Dimension]:
    sides = (("inputs", signature.inputs), ("outputs", signature.outputs))
    return {
        (side, which, at): dimension
        for side, ports in sides
        for which, port in enumerate(ports)
        for at, dimension in enumerate(port.shape)
    }


def _groups(signatures: Sequence[ModelSignature]) -> dict[_Place, _Place]:
    """Each place that varies, with the first place of its axis."""
    fixed = {place for one in signatures for place, length in _places(one).items() if isinstance(length, int)}
    root = {place: place for place in _places(signatures[0]) if place not in fixed}
    for signature in signatures:
        holders: dict[str, _Place] = {}
        for place, symbol in _places(signature).items():
            if isinstance(symbol, str) and place in root:
                _join(root, holders.setdefault(symbol, place), place)
    return root


def _join(root: dict[_Place, _Place], one: _Place, two: _Place) -> None:
    first, second = sorted((root[one], root[two]))
    for place, its in root.items():
        if its == second:
            root[place] = first


def _axis_names(signatures: Sequence[ModelSignature], root: dict[_Place, _Place]) -> dict[_Place, str]:
    names: dict[_Place, str] = {}
    for first in sorted(set(root.values())):
        members = [place for place in root if root[place] == first]
        wanted = next(
            (name for name in _symbols(signatures, members) if _is_name(name)), _fallback(signatures, members)
        )
        name, number = wanted, 2
        while name in names.values():
            name, number = f"{wanted}_{number}", number + 1
        names[first] = name
    return names


def _symbols(signatures: Sequence[ModelSignature], members: Sequence[_Place]) -> list[str]:
    found = [_places(signature)[place] for signature in signatures for place in members]
    return [symbol for symbol in found if isinstance(symbol, str)]


def _is_name(symbol: str) -> bool:
    return _NAME.fullmatch(symbol) is not None and _TORCH_SYMBOL.fullmatch(symbol) is None


def _fallback(signatures: Sequence[ModelSignature], members: Sequence[_Place]) -> str:
    side, which, at = members[0]
    if side == "inputs" and at == 0:
        return "batch"
    port = getattr(signatures[0], side)[which]
    return f"{port.name or f'output_{which}'}_{at}"


def _shape(
    side: str, which: int, signatures: Sequence[ModelSignature], root: dict[_Place, _Place], names: dict[_Place, str]
) -> tuple[int | str, ...]:
    shape: list[int | str] = []
    for at in range(len(getattr(signatures[0], side)[which].shape)):
        place = (side, which, at)
        lengths = [_places(signature)[place] for signature in signatures]
        fixed = next((length for length in lengths if isinstance(length, int)), None)
        shape.append(names[root[place]] if fixed is None else fixed)
    return tuple(shape)


def _bounds(which: int, signatures: Sequence[ModelSignature]) -> Bounds | None:
    """What all artefacts accept."""
    found = [bounds for signature in signatures if (bounds := signature.inputs[which].bounds) is not None]
    if not found:
        return None
    return Bounds(max(bounds.min for bounds in found), min(bounds.max for bounds in found))


def _range(first: _Place, signatures: Sequence[ModelSignature], root: dict[_Place, _Place]) -> tuple[int, int | None]:
    members = [place for place in root if root[place] == first]
    ranges = [
        signature.ranges[symbol]
        for signature in signatures
        for symbol in {_places(signature)[place] for place in members}
        if isinstance(symbol, str) and symbol in signature.ranges
    ]
    uppers = [most for _, most in ranges if most is not None]
    return max([1, *(least for least, _ in ranges)]), min(uppers, default=None)


def _output_names(signatures: Sequence[ModelSignature], given: Sequence[str]) -> list[str]:
    count = len(signatures[0].outputs)
    if given:
        return list(given)
    named = next((one for one in signatures if all(port.name for port in one.outputs)), None)
    if named is not None:
        return [port.name for port in named.outputs]
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]

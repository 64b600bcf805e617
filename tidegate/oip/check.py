"""Checks a request against its model's manifest, so that no target ever gets input that the model is not defined for.

A bad tensor that reaches a batch spoils it for its batch-mates, and an embedding index beyond the table kills a worker.
So every server checks names, datatypes, ranks, axis lengths, axes that two inputs share, sizes and values here, and the
error names the input that is wrong and what would be right.

This runs on every request, so a manifest is compiled once into a `Checker`, and values are only looked at where the
manifest bounds them: as one numpy reduction over the bytes that arrived, without a copy. An integer tensor that is
bounded from zero is read as unsigned, where negative numbers are huge ones: one pass instead of two, and for a short
row Python's own `max` is there before numpy has begun. NaN is outside of any bounds because every comparison with it
is false.

What it leaves to others: whether the model exists and is ready (the host), whether any target takes this much work
(placement).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from tidegate.arrays import walk_bytes
from tidegate.models.manifest import Axis, Bounds, Manifest, TensorSpec
from tidegate.outcome import InvalidRequest, ModelNotFound
from tidegate.types import Datatype, InferRequest, Tensor

MAX_ID_CHARACTERS: Final = 1024

_Letter = Literal["B", "H", "I", "Q"]
_UNSIGNED: Final[Mapping[int, _Letter]] = {1: "B", 2: "H", 4: "I", 8: "Q"}  # by size, on machines of today
_SHORT_ROW: Final = 64  # elements up to which `max` over a memoryview beats a numpy reduction
_largest: Final = np.maximum.reduce
_smallest: Final = np.minimum.reduce

_MAX_CHECKERS: Final = 256
_checkers: dict[int, Checker] = {}


def check(request: InferRequest, manifest: Manifest) -> None:
    """Refuse a request that `manifest` does not allow.

    Raises:
        InvalidRequest: names the input or output and what is wrong with it.
        ModelNotFound: the manifest is that of another model or version.
    """
    checker_of(manifest).check(request)


def checker_of(manifest: Manifest) -> Checker:
    """The compiled check of a manifest. Kept by identity, since a manifest never changes once it is loaded."""
    # The checker holds its manifest, so no other object can take its id while the entry is here.
    checker = _checkers.get(id(manifest))
    if checker is None:
        if len(_checkers) >= _MAX_CHECKERS:
            _checkers.clear()
        checker = _checkers[id(manifest)] = Checker(manifest)
    return checker


@dataclass(frozen=True, slots=True)
class _Dimension:
    """The lengths that one entry of a shape may have; entries of the same `axis` must agree across inputs."""

    low: int
    high: int
    axis: str | None


@dataclass(frozen=True, slots=True)
class _Scan:
    """Which values are allowed, and how the raw bytes are read to see them in as few passes as possible."""

    dtype: np.dtype[Any]
    low: float | None  # None: the unsigned reading makes the lower bound part of the upper one
    high: float
    native: _Letter | None = None  # the format by which a memoryview reads the elements, if it can


@dataclass(frozen=True, slots=True)
class _Rule:
    spec: TensorSpec
    dimensions: tuple[_Dimension, ...]
    itemsize: int
    scan: _Scan | None


class Checker:
    """What one manifest allows, laid out for checking in one pass over a request's inputs."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._rules = {spec.name: _rule(spec, manifest.axes) for spec in manifest.inputs}
        self._required = frozenset(spec.name for spec in manifest.inputs if not spec.optional)
        self._outputs = frozenset(spec.name for spec in manifest.outputs)
        self._variants = frozenset(word for variant in manifest.variants for word in (variant.name, variant.precision))

    def __repr__(self) -> str:
        return f"<Checker {self._manifest.name}:{self._manifest.version} {len(self._rules)} inputs>"

    def check(self, request: InferRequest) -> None:
        """Raises InvalidRequest or ModelNotFound, as `check` does."""
        self._check_address(request)
        inputs = request.inputs
        lengths: dict[str, int] = {}
        for tensor in inputs:
            rule = self._rules.get(tensor.name)
            if rule is None:
                raise InvalidRequest(f"unknown input {quoted_input(tensor.name)}; {self._takes()}")
            _check_tensor(tensor, rule, lengths)
        names = {tensor.name for tensor in inputs}
        if len(names) != len(inputs) or not self._required <= names:
            raise self._wrong_set(inputs, names)
        if request.outputs:
            self._check_outputs(request)

    def check_variant(self, variant: str) -> None:
        """Raises InvalidRequest when no variant of the model has this name or precision; "" demands none."""
        if variant and variant not in self._variants:
            known = ", ".join(variant.name for variant in self._manifest.variants) or "none"
            raise InvalidRequest(
                f"model {self._manifest.name!r} has no variant {quoted_input(variant)}; its variants are: {known}"
            )

    def _check_address(self, request: InferRequest) -> None:
        if request.model_name != self._manifest.name:
            raise ModelNotFound(f"unknown model {quoted_input(request.model_name)}")
        if request.model_version and request.model_version != self._manifest.version:
            raise ModelNotFound(f"model {self._manifest.name!r} has no version {quoted_input(request.model_version)}")
        if len(request.id) > MAX_ID_CHARACTERS:
            raise InvalidRequest(f"the request's id has {len(request.id)} characters, at most {MAX_ID_CHARACTERS} may")

    def _wrong_set(self, inputs: Sequence[Tensor], names: set[str]) -> InvalidRequest:
        missing = sorted(self._required - names)
        if missing:
            return InvalidRequest(f"missing input {', '.join(map(repr, missing))}; {self._takes()}")
        counts = [tensor.name for tensor in inputs]
        return InvalidRequest(f"input {next(name for name in counts if counts.count(name) > 1)!r} came more than once")

    def _check_outputs(self, request: InferRequest) -> None:
        seen = set()
        for output in request.outputs:
            if output.name not in self._outputs:
                known = ", ".join(sorted(self._outputs))
                raise InvalidRequest(
                    f"unknown output {quoted_input(output.name)}; model {self._manifest.name!r} gives: {known}"
                )
            if output.name in seen:
                raise InvalidRequest(f"output {output.name!r} was asked for more than once")
            seen.add(output.name)

    def _takes(self) -> str:
        return f"model {self._manifest.name!r} takes: {', '.join(self._rules)}"


def quoted_input(value: object) -> str:
    """A value from the network as it may stand in a message: quoted, escaped, and never long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _rule(spec: TensorSpec, axes: Mapping[str, Axis]) -> _Rule:
    return _Rule(
        spec=spec,
        dimensions=tuple(_dimension(entry, axes) for entry in spec.shape),
        itemsize=spec.datatype.itemsize,
        scan=_scan(spec.datatype, spec.bounds),
    )


def _dimension(entry: int | str, axes: Mapping[str, Axis]) -> _Dimension:
    if isinstance(entry, int):
        return _Dimension(entry, entry, None) if entry >= 0 else _Dimension(0, Axis().max, None)
    axis = axes.get(entry, Axis())
    return _Dimension(axis.min, axis.max, entry)


def _scan(datatype: Datatype, bounds: Bounds | None) -> _Scan | None:
    if datatype is Datatype.BOOL:
        return _Scan(
            np.dtype("<u1"), None, 1.0
        )  # any other byte is no boolean, and engines differ in what they make of it
    if bounds is None or datatype is Datatype.BYTES:
        return None
    name = datatype.numpy_name
    if name[1] in "iu" and datatype is not Datatype.BF16 and bounds.min == 0:
        unsigned = np.dtype(name.replace("i", "u"))
        return _Scan(unsigned, None, bounds.max, _UNSIGNED[unsigned.itemsize] if unsigned.isnative else None)
    return _Scan(np.dtype(name), bounds.min, bounds.max)


def _check_tensor(tensor: Tensor, rule: _Rule, lengths: dict[str, int]) -> None:
    if tensor.datatype is not rule.spec.datatype:
        raise InvalidRequest(f"input {tensor.name!r} must be {rule.spec.datatype.value}, got {tensor.datatype.value}")
    shape = tensor.shape
    if len(shape) != len(rule.dimensions):
        raise InvalidRequest(
            f"input {tensor.name!r} must have {len(rule.dimensions)} dimensions {_expected(rule)}, "
            f"got {quoted_input(list(shape))}"
        )
    for length, dimension in zip(shape, rule.dimensions, strict=True):
        if not dimension.low <= length <= dimension.high:
            raise _wrong_length(tensor, rule, dimension, length)
        if dimension.axis is not None and lengths.setdefault(dimension.axis, length) != length:
            raise InvalidRequest(
                f"input {tensor.name!r}: axis {dimension.axis!r} is {length} here but {lengths[dimension.axis]} "
                f"in another input; they must agree"
            )
    _check_content(tensor, rule)


def _check_content(tensor: Tensor, rule: _Rule) -> None:
    elements = prod(tensor.shape)
    if not rule.itemsize:
        _check_byte_strings(tensor, elements)
        return
    if len(tensor.raw) != elements * rule.itemsize:
        raise InvalidRequest(
            f"input {tensor.name!r}: {tensor.datatype.value}{list(tensor.shape)} needs "
            f"{elements * rule.itemsize} bytes, got {len(tensor.raw)}"
        )
    scan = rule.scan
    if scan is not None and elements and not _is_inside(tensor, scan, elements):
        raise _wrong_value(tensor, rule)


def _is_inside(tensor: Tensor, scan: _Scan, elements: int) -> bool:
    if scan.native is not None and elements <= _SHORT_ROW:
        return max(memoryview(tensor.raw).cast(scan.native)) <= scan.high
    values = np.frombuffer(tensor.raw, scan.dtype)
    if tensor.datatype is Datatype.BF16:
        values = _widened(values)
    # As Python numbers: comparing a numpy scalar costs as much as the reduction of a short row.
    return _largest(values).item() <= scan.high and (scan.low is None or _smallest(values).item() >= scan.low)


def _check_byte_strings(tensor: Tensor, elements: int) -> None:
    found = sum(1 for _ in walk_bytes(tensor.raw, name=tensor.name))
    if found != elements:
        raise InvalidRequest(f"input {tensor.name!r}: BYTES{list(tensor.shape)} needs {elements} elements, got {found}")


def _wrong_length(tensor: Tensor, rule: _Rule, dimension: _Dimension, length: int) -> InvalidRequest:
    axis = f"axis {dimension.axis!r}" if dimension.axis else "a fixed dimension"
    allowed = str(dimension.low) if dimension.low == dimension.high else f"{dimension.low} to {dimension.high}"
    return InvalidRequest(
        f"input {tensor.name!r}: {axis} must be {allowed}, got {quoted_input(length)}; the shape is {_expected(rule)}"
    )


def _wrong_value(tensor: Tensor, rule: _Rule) -> InvalidRequest:
    """Which element is outside, found only once there is one."""
    values: NDArray[Any] = np.frombuffer(
        tensor.raw, "<u1" if tensor.datatype is Datatype.BOOL else tensor.datatype.numpy_name
    )
    if tensor.datatype is Datatype.BF16:
        values = _widened(values)
    bounds = rule.spec.bounds or Bounds(0, 1)
    first = int(np.argmin((values >= bounds.min) & (values <= bounds.max)))
    where = [int(index) for index in np.unravel_index(first, tensor.shape)]
    return InvalidRequest(
        f"input {tensor.name!r}: element {where} is {values[first]}, "
        f"allowed is {_number(bounds.min)} to {_number(bounds.max)}"
    )


def _widened(bits: NDArray[Any]) -> NDArray[Any]:
    """BF16 bits as FP32: numpy has no bfloat16, which is the upper half of a float32."""
    return (bits.astype("<u4") << 16).view("<f4")


def _number(value: float) -> str:
    return str(int(value)) if isfinite(value) and value == int(value) else str(value)


def _expected(rule: _Rule) -> str:
    return "[" + ", ".join(str(entry) for entry in rule.spec.shape) + "]"

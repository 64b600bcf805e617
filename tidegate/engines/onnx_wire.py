"""Reads the references of an ONNX file off its bytes: operator domains, weights in other files, and impossible tensors.

A device has no `onnx` package, and a runtime that opens a file has already followed its references. So the protobuf is
walked by its wire format, along the few fields that matter: graphs, the bodies of If, Loop and Scan, functions,
training graphs, and every place that can hold a tensor. A tensor's content is skipped by its length, unread. What is
not well-formed raises ValueError; nesting and the number of parts are bounded.

`problem_in` is the verdict that every loader shares: nothing but the file itself may hold a part of the model,
operators are those that ONNX Runtime brings along, and no tensor claims more elements than its bytes can hold.

Source: onnx/onnx.proto (field numbers), protobuf encoding (wire types).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_MAX_DEPTH: Final = 64
_MAX_PARTS: Final = 20_000_000
_EXTERNAL: Final = 1
_32_BITS: Final = 0xFFFFFFFF
_MOST_PER_BYTE: Final = 4  # elements of the smallest types, of two bits
_NAMED: Final = 3
# ONNX's own, and what ONNX Runtime brings along: its quantized operators are in com.microsoft.
DOMAINS: Final = frozenset(
    {"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc"}
)
# Compiled for one device, and often in another file whose name is an attribute.
_COMPILED: Final = "EPContext"
# Numbers that an attribute lists one by one, as tree ensembles do by the million: skipped in one step.
_FLOATS: Final = re.compile(rb"(?:\x3d[\x00-\xff]{4})++")
_INTS: Final = re.compile(rb"(?:\x40[\x80-\xff]{0,9}[\x00-\x7f])++")


@dataclass(slots=True)
class References:
    """`domains` of the operators, "" being ONNX's own, without those of the model's own functions; `external`: names
    of weights that are in other files; `impossible`: names of tensors whose dimensions their bytes cannot fill."""

    domains: set[str] = field(default_factory=set)
    external: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    compiled: bool = False
    nodes: int = 0


def problem_in(model: memoryview, *, beside: bool = False) -> str:
    """Why the model may not be loaded, "" when nothing is wrong with it.

    Args:
        beside: whether weights may be in other files, for a reader that takes them in itself.
    """
    try:
        found = references(model)
    except ValueError as error:
        return f"is not an ONNX model: {error}"
    if not found.nodes:
        return "is not an ONNX model: it has no graph"
    if found.external and not beside:
        return f"keeps weights in other files ({', '.join(found.external[:_NAMED])})"
    if found.impossible:
        return f"has tensors with more elements than bytes for them ({', '.join(found.impossible[:_NAMED])})"
    if foreign := sorted(found.domains - DOMAINS):
        return f"uses operators that are not ONNX Runtime's own (domains {', '.join(foreign[:_NAMED])})"
    if found.compiled:
        return f"has parts that were compiled for one device ({_COMPILED})"
    return ""


def references(model: memoryview) -> References:
    """Raises ValueError: it is not a ModelProto."""
    walk = _ModelWalk()
    for number, value in walk.fields(model):
        if number == 7:  # graph
            walk.graph(_bytes(value), 0)
        elif number == 20:  # training: two graphs
            for inner, graph in walk.fields(_bytes(value)):
                if inner in (1, 2):
                    walk.graph(_bytes(graph), 0)
        elif number == 25:  # functions
            walk.function(_bytes(value))
    walk.found.domains -= walk.own
    return walk.found


class _ModelWalk:
    """One walk over a model; `own` are the domains of the functions that the model itself defines."""

    def __init__(self) -> None:
        self.found = References()
        self.own: set[str] = set()
        self._parts = 0

    def graph(self, graph: memoryview, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError("graphs are nested too deeply")
        for number, value in self.fields(graph):
            if number == 1:
                self.node(_bytes(value), depth)
            elif number == 5:
                self.tensor(_bytes(value))
            elif number == 15:
                self.sparse(_bytes(value))

    def function(self, function: memoryview) -> None:
        for number, value in self.fields(function):
            if number == 7:
                self.node(_bytes(value), 0)
            elif number == 10:
                self.own.add(_text(value))
            elif number == 11:  # attributes with defaults
                self.attribute(_bytes(value), 0)

    def node(self, node: memoryview, depth: int) -> None:
        domain = ""
        for number, value in self.fields(node):
            if number == 7:
                domain = _text(value)
            elif number == 4:
                self.found.compiled = self.found.compiled or _text(value) == _COMPILED
            elif number == 5:
                self.attribute(_bytes(value), depth)
        self.found.domains.add(domain)
        self.found.nodes += 1

    def attribute(self, attribute: memoryview, depth: int) -> None:
        for number, value in self.fields(attribute):
            if number in (6, 11):  # a graph, graphs
                self.graph(_bytes(value), depth + 1)
            elif number in (5, 10):  # a tensor, tensors
                self.tensor(_bytes(value))
            elif number in (22, 23):  # a sparse tensor, sparse tensors
                self.sparse(_bytes(value))

    def sparse(self, sparse: memoryview) -> None:
        for number, value in self.fields(sparse):
            if number in (1, 2):  # values and indices are tensors
                self.tensor(_bytes(value))

    def tensor(self, tensor: memoryview) -> None:
        name, external, elements = "", False, 1  # a tensor without dimensions is a number
        for number, value in self.fields(tensor):
            if number == 1:
                elements *= self._product(value)
            elif number == 8:
                name = _text(value)
            elif number == 13 or (number == 14 and isinstance(value, int) and value & _32_BITS == _EXTERNAL):
                external = True
        if external:
            self.found.external.append(name)
        elif elements > max(1, _MOST_PER_BYTE * len(tensor)):
            self.found.impossible.append(name)

    def _product(self, dims: int | memoryview) -> int:
        """The product of one dimension, or of several in one field; a negative one counts as too many."""
        sizes, at = [dims] if isinstance(dims, int) else [], 0
        while not isinstance(dims, int) and at < len(dims):
            size, at = _varint(dims, at)
            sizes.append(size)
        product = 1
        for size in sizes:
            product = min(product * size, 1 << 64)
        return product

    def fields(self, message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
        """(field number, value) in order; a value is a number, or the bytes of what has a length."""
        at = 0
        while at < len(message):
            # Nothing here reads a number in field 7 or 8, so a run of them can be passed over in any message.
            if message[at] in (0x3D, 0x40) and (run := _FLOATS.match(message, at) or _INTS.match(message, at)):
                at = run.end()
                continue
            self._parts += 1
            if self._parts > _MAX_PARTS:
                raise ValueError(f"more than {_MAX_PARTS} parts")
            key, at = _varint(message, at)
            if key > _32_BITS:
                raise ValueError("a key of more than 32 bits")  # others read its lower bits, as another field
            number, wire = key >> 3, key & 7
            if wire == 0:
                value, at = _varint(message, at)
                yield number, value
            elif wire in (1, 2, 5):
                length, at = _varint(message, at) if wire == 2 else ((8, at) if wire == 1 else (4, at))
                if at + length > len(message):
                    raise ValueError("a field runs past the end")
                yield number, message[at : at + length]
                at += length
            else:
                raise ValueError(f"wire type {wire}")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number that does not end")


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where a message belongs")
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_bytes(value)).decode("utf-8", "replace")

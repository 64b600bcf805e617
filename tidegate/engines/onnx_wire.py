"""Reads the references of an ONNX file off its bytes: operator domains, and weights in other files.

A device has no `onnx` package, and a runtime that opens a file has already followed its references. So the protobuf is
walked by its wire format, along the few fields that matter; tensors are skipped by their length, unread. Whatever is
not well-formed raises ValueError; nesting is bounded.

Source: onnx/onnx.proto3 (field numbers), protobuf encoding (wire types).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_MAX_DEPTH: Final = 64
_EXTERNAL: Final = 1


@dataclass(slots=True)
class References:
    """`domains` of the operators, "" being ONNX's own; `external`: names of weights that are in other files."""

    domains: set[str] = field(default_factory=set)
    external: list[str] = field(default_factory=list)
    nodes: int = 0


def references(model: memoryview) -> References:
    """Raises ValueError: it is not a ModelProto."""
    found = References()
    for number, value in _fields(model):
        if number == 7:  # graph
            _graph(_bytes(value), found, 0)
        elif number == 25:  # functions
            for inner, node in _fields(_bytes(value)):
                if inner == 7:
                    _node(_bytes(node), found, 0)
    return found


def _graph(graph: memoryview, found: References, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError("graphs are nested too deeply")
    for number, value in _fields(graph):
        if number == 1:
            _node(_bytes(value), found, depth)
        elif number == 5:
            _tensor(_bytes(value), found)
        elif number == 15:  # sparse initializers: values and indices are tensors
            for inner, tensor in _fields(_bytes(value)):
                if inner in (1, 2):
                    _tensor(_bytes(tensor), found)


def _node(node: memoryview, found: References, depth: int) -> None:
    domain = ""
    for number, value in _fields(node):
        if number == 7:
            domain = bytes(_bytes(value)).decode("utf-8", "replace")
        elif number == 5:
            _attribute(_bytes(value), found, depth)
    found.domains.add(domain)
    found.nodes += 1


def _attribute(attribute: memoryview, found: References, depth: int) -> None:
    for number, value in _fields(attribute):
        if number in (6, 11):  # a graph, graphs
            _graph(_bytes(value), found, depth + 1)
        elif number in (5, 10):  # a tensor, tensors
            _tensor(_bytes(value), found)


def _tensor(tensor: memoryview, found: References) -> None:
    name, external = "", False
    for number, value in _fields(tensor):
        if number == 8 and not isinstance(value, int):
            name = bytes(value).decode("utf-8", "replace")
        elif number == 13 or (number == 14 and value == _EXTERNAL):
            external = True
    if external:
        found.external.append(name)


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value) in order; a value is a number, or the bytes of what has a length."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
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

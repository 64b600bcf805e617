"""The references of an ONNX file are read off its bytes, in valid and in damaged files."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.support.models.tiny_models import double_graph, rounds_graph
from tidegate.engines.onnx_wire import references

WHOLE = rounds_graph().SerializeToString()


def test_operators_of_nested_graphs_are_counted_in() -> None:
    found = references(memoryview(WHOLE))
    assert found.domains == {""}
    assert found.nodes == len(rounds_graph().graph.node) + 2
    assert found.external == []


def test_foreign_domains_and_weights_in_other_files_are_seen() -> None:
    model = double_graph()
    model.graph.node.append(helper.make_node("Steal", ["x"], ["z"], domain="evil.ops"))
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="/etc/passwd")
    model.graph.initializer.append(weight)
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=weight))
    found = references(memoryview(model.SerializeToString()))
    assert found.domains == {"", "evil.ops"}
    assert found.external == ["w", "w"]


def test_functions_of_a_model_are_looked_into() -> None:
    node = helper.make_node("Do", ["a"], ["b"], domain="hidden")
    function = helper.make_function("d", "f", ["a"], ["b"], [node], [helper.make_opsetid("", 17)])
    model = helper.make_model(double_graph().graph, functions=[function])
    assert "hidden" in references(memoryview(model.SerializeToString())).domains


def test_graphs_in_graphs_without_end_are_refused() -> None:
    graph = b""
    for _ in range(80):
        graph = field(1, field(5, field(6, graph)))  # node › attribute › graph
    raw = field(7, graph)
    with pytest.raises(ValueError, match="nested too deeply"):
        references(memoryview(raw))


@pytest.mark.slow
@settings(max_examples=200)
@given(at=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(WHOLE)))
def test_damage_is_refused_or_read_and_nothing_else(at: int, byte: int, cut: int) -> None:
    raw = bytearray(WHOLE)
    raw[at] = byte
    with suppress(ValueError):
        references(memoryview(bytes(raw[:cut])))


def field(number: int, content: bytes) -> bytes:
    """By protobuf's wire format: a key, a length of three bytes, the content."""
    length = len(content)
    sizes = bytes((length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14))
    return bytes((number << 3 | 2,)) + sizes + content

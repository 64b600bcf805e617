"""The references of an ONNX file are read off its bytes, in valid and in damaged files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, ModelProto, SparseTensorProto, StringStringEntryProto, TensorProto, helper

from tests.support.models.tiny_models import double_graph, rounds_graph
from tidegate.engines import onnx_wire
from tidegate.engines.onnx_wire import problem_in, references

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


def weight_elsewhere(name: str = "w") -> TensorProto:
    weight = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="/etc/passwd")
    return weight


def in_a_branch(model: ModelProto) -> None:
    body = helper.make_graph([helper.make_node("Identity", ["w"], ["b"])], "body", [], [], [weight_elsewhere()])
    model.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=body, else_branch=body))


def in_a_tensor_of_a_branch(model: ModelProto) -> None:
    body = helper.make_graph([helper.make_node("Constant", [], ["b"], value=weight_elsewhere())], "body", [], [])
    model.graph.node.append(helper.make_node("Loop", ["x"], ["z"], body=body))


def in_a_sparse_attribute(model: ModelProto) -> None:
    sparse = SparseTensorProto(values=weight_elsewhere(), dims=[1])
    node = helper.make_node("Constant", [], ["c"])
    node.attribute.append(AttributeProto(name="sparse_value", type=AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse))
    model.graph.node.append(node)


def in_a_functions_default(model: ModelProto) -> None:
    function = helper.make_function("d", "f", ["a"], ["b"], [], [helper.make_opsetid("", 17)])
    function.attribute_proto.append(helper.make_attribute("value", weight_elsewhere()))
    model.functions.append(function)


def in_a_training_graph(model: ModelProto) -> None:
    training = model.training_info.add()
    training.algorithm.initializer.append(weight_elsewhere())


@pytest.mark.parametrize(
    "hide", [in_a_branch, in_a_tensor_of_a_branch, in_a_sparse_attribute, in_a_functions_default, in_a_training_graph]
)
def test_weights_in_other_files_are_seen_wherever_a_model_can_hold_them(hide: Callable[[ModelProto], None]) -> None:
    model = double_graph()
    hide(model)
    assert problem_in(memoryview(model.SerializeToString())).startswith("keeps weights in other files (w")


def test_a_key_that_parsers_read_in_two_ways_is_refused() -> None:
    # protobuf keeps 32 bits of a key: this one reads as field 13 of a tensor, external data, and as field 2**28 + 13.
    entry = StringStringEntryProto(key="location", value="/etc/passwd").SerializeToString()
    tensor = varint(1 << 32 | 13 << 3 | 2) + bytes((len(entry),)) + entry
    with pytest.raises(ValueError, match="more than 32 bits"):
        references(memoryview(field(7, field(5, tensor))))


def test_a_number_of_a_location_counts_by_its_lower_32_bits_as_in_protobuf() -> None:
    tensor = b"\x70" + varint(1 << 32 | 1)
    assert references(memoryview(field(7, field(5, tensor)))).external == [""]


def test_functions_of_the_model_itself_are_not_foreign() -> None:
    function = helper.make_function("own", "f", ["a"], ["b"], [helper.make_node("Identity", ["a"], ["b"])], [])
    model = helper.make_model(double_graph().graph, functions=[function])
    model.graph.node.append(helper.make_node("f", ["x"], ["z"], domain="own"))
    assert problem_in(memoryview(model.SerializeToString())) == ""
    model.graph.node.append(helper.make_node("g", ["x"], ["v"], domain="foreign"))
    assert "(domains foreign)" in problem_in(memoryview(model.SerializeToString()))


@pytest.mark.parametrize("dims", [[1 << 40], [1 << 31, 1 << 31, 1 << 31], [-1]])
def test_a_tensor_with_more_elements_than_bytes_is_refused(dims: list[int]) -> None:
    model = double_graph()
    model.graph.initializer.append(TensorProto(name="huge", data_type=TensorProto.FLOAT, dims=dims, raw_data=b"1234"))
    assert "more elements than bytes for them (huge)" in problem_in(memoryview(model.SerializeToString()))


def test_what_was_compiled_for_one_device_is_refused() -> None:
    model = double_graph()
    node = helper.make_node("EPContext", ["x"], ["z"], domain="com.microsoft", ep_cache_context="/etc/passwd")
    model.graph.node.append(node)
    assert "compiled for one device" in problem_in(memoryview(model.SerializeToString()))


def test_long_lists_of_numbers_are_skipped_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_wire, "_MAX_PARTS", 1000)
    numbers = {"nodes_values": [0.5] * 100_000, "nodes_featureids": list(range(100_000))}
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **numbers)
    raw = helper.make_model(helper.make_graph([node], "g", [], [], [weight_elsewhere()])).SerializeToString()
    found = references(memoryview(raw))
    assert (found.nodes, found.external) == (1, ["w"])
    with pytest.raises(ValueError, match="more than 1000 parts"):
        references(memoryview(field(7, field(2, b"g")) * 1000))


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


def varint(value: int) -> bytes:
    """A number by protobuf's wire format."""
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))

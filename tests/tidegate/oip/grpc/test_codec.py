"""OIP's protobuf messages, there and back, and what a careless client may send."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.tidegate.oip.tensors import PARAMETERS, several
from tidegate.oip.content_limits import DEFAULT
from tidegate.oip.grpc.codec import (
    bytes_from_response,
    message_from_request,
    message_from_response,
    request_from_message,
    response_from_bytes,
    response_from_message,
)
from tidegate.outcome import BadAnswer, InvalidRequest, NotSupported
from tidegate.rpc import oip_pb2
from tidegate.types import Datatype, InferRequest, InferResponse, Parameter, RequestedOutput, Tensor

DATATYPE = {datatype.value: datatype for datatype in Datatype}


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@pytest.mark.slow
@given(several(), PARAMETERS, PARAMETERS, st.text("abc", max_size=4))
def test_a_request_crosses_the_wire_unchanged(
    inputs: tuple[Tensor, ...], parameters: dict[str, Parameter], own: dict[str, Parameter], id_: str
) -> None:
    inputs = tuple(replace(tensor, parameters=own) for tensor in inputs)
    request = InferRequest("m", inputs, "2", id_, (RequestedOutput("y", own), RequestedOutput("z")), parameters)
    assert request_from_message(over_the_wire(message_from_request(request))) == request


@pytest.mark.slow
@given(several(), PARAMETERS, PARAMETERS, st.text("abc", max_size=4))
def test_a_response_crosses_the_wire_unchanged(
    outputs: tuple[Tensor, ...], parameters: dict[str, Parameter], own: dict[str, Parameter], id_: str
) -> None:
    outputs = tuple(replace(tensor, parameters=own) for tensor in outputs)
    response = InferResponse("m", "2", outputs, id_, parameters)
    assert response_from_message(over_the_wire(message_from_response(response))) == response
    assert response_from_bytes(bytes_from_response(response)) == response


@pytest.mark.parametrize("size_bytes", [0, 1, 127, 128, 16383, 16384, 2**21])
def test_an_answer_that_is_joined_from_its_parts_is_the_message_that_it_stands_for(size_bytes: int) -> None:
    outputs = (Tensor("a", Datatype.UINT8, (size_bytes,), bytes(size_bytes)), Tensor("b", Datatype.INT8, (1, 1), b"x"))
    response = InferResponse("m", "2", outputs, "ä" * min(size_bytes, 200))
    joined = oip_pb2.ModelInferResponse.FromString(bytes_from_response(response))
    assert joined == message_from_response(response)


def test_views_are_sent_as_the_bytes_that_they_show() -> None:
    tensor = Tensor("x", Datatype.FP32, (1,), memoryview(b"..abcd..")[2:6])
    message = message_from_request(InferRequest("m", (tensor,)))
    assert list(message.raw_input_contents) == [b"abcd"]


def test_every_output_of_an_answer_is_raw_and_in_order() -> None:
    outputs = tuple(Tensor(name, DATATYPE["UINT8"], (1,), name.encode()) for name in "abc")
    message = message_from_response(InferResponse("m", "1", outputs), {"tidegate-served-by": "edge/attic"})
    assert list(message.raw_output_contents) == [b"a", b"b", b"c"]
    assert not any(output.HasField("contents") for output in message.outputs)
    assert message.parameters["tidegate-served-by"].string_param == "edge/attic"


def typed(datatype: str, field: str, values: list[Any], shape: list[int] | None = None) -> oip_pb2.ModelInferRequest:
    message = oip_pb2.ModelInferRequest(model_name="m")
    entry = message.inputs.add(name="x", datatype=datatype, shape=[len(values)] if shape is None else shape)
    getattr(entry.contents, field).extend(values)
    return message


@pytest.mark.parametrize(("datatype", "field", "values"), [
    ("BOOL", "bool_contents", [True, False]),
    ("UINT8", "uint_contents", [0, 255]),
    ("UINT16", "uint_contents", [65535]),
    ("UINT32", "uint_contents", [2**32 - 1]),
    ("UINT64", "uint64_contents", [2**64 - 1]),
    ("INT8", "int_contents", [-128, 127]),
    ("INT16", "int_contents", [-32768]),
    ("INT32", "int_contents", [-(2**31)]),
    ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
    ("FP32", "fp32_contents", [0.5, float("nan")]),
    ("FP64", "fp64_contents", [1e300]),
])  # fmt: skip
def test_typed_contents_become_the_bytes_they_mean(datatype: str, field: str, values: list[Any]) -> None:
    (tensor,) = request_from_message(typed(datatype, field, values)).inputs
    wanted = np.array(values, dtype=DATATYPE[datatype].numpy_name)
    assert bytes(tensor.raw) == wanted.tobytes()


def test_typed_byte_strings_get_their_lengths() -> None:
    (tensor,) = request_from_message(typed("BYTES", "bytes_contents", [b"hi", b""])).inputs
    assert tensor.raw == struct.pack("<I", 2) + b"hi" + struct.pack("<I", 0)


def raw_request(entries: int, raw: int) -> oip_pb2.ModelInferRequest:
    message = oip_pb2.ModelInferRequest(model_name="m")
    for index in range(entries):
        message.inputs.add(name=f"x{index}", datatype="UINT8", shape=[1])
    message.raw_input_contents.extend([b"x"] * raw)
    return message


def mixed() -> oip_pb2.ModelInferRequest:
    message = typed("INT64", "int64_contents", [1])
    message.raw_input_contents.append(b"12345678")
    return message


@pytest.mark.parametrize(("message", "words"), [
    (typed("INT8", "int_contents", [128]), "does not fit into INT8"),
    (typed("UINT8", "uint_contents", [256]), "does not fit into UINT8"),
    (typed("FP16", "fp32_contents", [1.0]), "FP16 has no typed contents"),
    (typed("BF16", "fp32_contents", [1.0]), "BF16 has no typed contents"),
    (typed("INT64", "fp32_contents", [1.0]), "must be in contents.int64_contents"),
    (typed("FP33", "fp32_contents", [1.0]), "unknown datatype 'FP33'"),
    (typed("", "fp32_contents", [1.0]), "unknown datatype ''"),
    (raw_request(2, 1), "2 inputs but 1 entries"),
    (raw_request(1, 2), "1 inputs but 2 entries"),
    (raw_request(0, 1), "0 inputs but 1 entries"),
    (raw_request(DEFAULT.max_tensors + 1, 0), "at most 1024 may come"),
    (mixed(), "use one of them"),
    (oip_pb2.ModelInferRequest(
        outputs=[oip_pb2.ModelInferRequest.InferRequestedOutputTensor(name="y")] * (DEFAULT.max_tensors + 1)
    ), "1025 outputs"),
])  # fmt: skip
def test_a_careless_request_is_refused(message: oip_pb2.ModelInferRequest, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        request_from_message(message)


def test_shared_memory_is_not_supported() -> None:
    message = raw_request(1, 1)
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(NotSupported):
        request_from_message(message)
    message = raw_request(1, 1)
    message.outputs.add(name="y").parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(NotSupported):
        request_from_message(message)


def test_a_bad_answer_is_its_servers_fault() -> None:
    message = oip_pb2.ModelInferResponse(model_name="m", raw_output_contents=[b"x"])
    with pytest.raises(BadAnswer):
        response_from_message(message)


def test_a_foreign_servers_typed_answer_is_read() -> None:
    message = oip_pb2.ModelInferResponse(model_name="m")
    message.outputs.add(name="y", datatype="FP32", shape=[1]).contents.fp32_contents.append(0.5)
    assert bytes(response_from_message(message).outputs[0].raw) == struct.pack("<f", 0.5)


def test_a_parameter_without_a_value_is_passed_by() -> None:
    message = raw_request(0, 0)
    message.parameters["empty"].SetInParent()
    assert request_from_message(message).parameters == {}


@pytest.mark.parametrize("arm", ["int64_param", "uint64_param"])
def test_an_integer_is_read_from_either_arm(arm: str) -> None:
    message = raw_request(0, 0)
    setattr(message.parameters["priority"], arm, 3)
    assert request_from_message(message).parameters == {"priority": 3}

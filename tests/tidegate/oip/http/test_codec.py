"""OIP's HTTP bodies: numbers and bytes, there and back, and every way in which a body can be wrong."""

from __future__ import annotations

import json
import struct
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.serving.host import digits, minilm
from tests.tidegate.oip.tensors import NAMES, PARAMETERS, several, tensors
from tidegate.models.manifest import Cost, Manifest, TensorSpec
from tidegate.oip.http.codec import (
    BinaryOutputs,
    Decoded,
    decode_raw_request,
    decode_request,
    encode_response,
    header_length_of,
)
from tidegate.outcome import BadAnswer, InvalidRequest, NotSupported
from tidegate.types import Datatype, InferRequest, InferResponse, Parameter, Tensor

JSON_KINDS = [kind for kind in Datatype if kind not in (Datatype.FP16, Datatype.BF16, Datatype.BYTES)]


def body_of(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def entry(data: Any = None, shape: Any = (1,), datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    made = {"name": "x", "shape": list(shape), "datatype": datatype, **more}
    return made if data is None else {**made, "data": data}


def decode(body: bytes, header_length: int | None = None) -> Decoded:
    return decode_request(body, header_length=header_length, model_name="m")


def binary_body(inputs: tuple[Tensor, ...], **more: Any) -> tuple[bytes, int]:
    header = body_of(
        *(
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "datatype": tensor.datatype.value,
                "parameters": {**tensor.parameters, "binary_data_size": len(tensor.raw)},
            }
            for tensor in inputs
        ),
        **more,
    )
    return b"".join((header, *(bytes(tensor.raw) for tensor in inputs))), len(header)


# What passes


@pytest.mark.slow
@given(several(), PARAMETERS, NAMES)
def test_binary_tensors_arrive_as_they_are(
    inputs: tuple[Tensor, ...], parameters: dict[str, Parameter], id_: str
) -> None:
    body, length = binary_body(inputs, parameters=parameters, id=id_)
    request = decode(body, length).request
    assert request == InferRequest("m", inputs, id=id_, parameters=parameters)


@pytest.mark.slow
@given(several())
def test_binary_tensors_are_views_of_the_body(inputs: tuple[Tensor, ...]) -> None:
    body, length = binary_body(inputs)
    for tensor in decode(body, length).request.inputs:
        assert isinstance(tensor.raw, memoryview)
        assert tensor.raw.obj is body


@pytest.mark.slow
@given(tensors().filter(lambda tensor: tensor.datatype in JSON_KINDS), st.booleans())
def test_numbers_become_the_bytes_they_mean_flat_or_nested(tensor: Tensor, nested: bool) -> None:
    array = np.frombuffer(tensor.raw, tensor.datatype.numpy_name).reshape(tensor.shape)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return  # JSON has no such numbers
    data = array.tolist() if nested and tensor.shape else array.reshape(-1).tolist()
    (back,) = decode(body_of(entry(data, tensor.shape, tensor.datatype.value))).request.inputs
    assert (back.datatype, back.shape) == (tensor.datatype, tensor.shape)
    assert bytes(back.raw) == tensor.raw


def test_texts_become_byte_strings_flat_or_nested() -> None:
    wanted = struct.pack("<I", 3) + "né".encode() + struct.pack("<I", 0)
    for data in (["né", ""], [["né"], [""]]):
        (tensor,) = decode(body_of(entry(data, (2, 1), "BYTES"))).request.inputs
        assert tensor.raw == wanted


def test_json_and_binary_inputs_may_come_in_one_body() -> None:
    first = entry([1.5], name="a")
    second = entry(shape=(2,), datatype="UINT8", name="b", parameters={"binary_data_size": 2})
    header = body_of(first, second)
    a, b = decode(header + b"hi", len(header)).request.inputs
    assert (bytes(a.raw), bytes(b.raw)) == (struct.pack("<f", 1.5), b"hi")


def test_words_about_this_body_end_here_and_all_others_stay() -> None:
    body = body_of(
        entry(shape=(0,), parameters={"binary_data_size": 0, "mine": 1}),
        outputs=[{"name": "y", "parameters": {"binary_data": True, "theirs": "z"}}, {"name": "w"}],
        parameters={"binary_data_output": True, "priority": 2},
    )
    decoded = decode(body, len(body))
    request = decoded.request
    assert request.inputs[0].parameters == {"mine": 1}
    assert [output.parameters for output in request.outputs] == [{"theirs": "z"}, {}]
    assert request.parameters == {"priority": 2}


@pytest.mark.parametrize(("default", "named", "binary"), [
    (None, None, False), (True, None, True), (False, True, True), (True, False, False), (None, True, True),
])  # fmt: skip
def test_an_outputs_own_word_overrides_the_requests(default: bool | None, named: bool | None, binary: bool) -> None:
    output = {"name": "y"} if named is None else {"name": "y", "parameters": {"binary_data": named}}
    more = {} if default is None else {"parameters": {"binary_data_output": default}}
    assert ("y" in decode(body_of(entry([1]), outputs=[output], **more)).binary) is binary


def test_numbers_may_carry_parameters_of_their_own() -> None:
    (tensor,) = decode(body_of(entry([1], parameters={"mine": 1}))).request.inputs
    assert (tensor.parameters, len(tensor.raw)) == ({"mine": 1}, 4)


def test_nulls_and_unknown_fields_are_as_if_absent() -> None:
    body = body_of(entry([1], parameters=None), id=None, parameters=None, outputs=None, new={"deep": [1]})
    assert decode(body).request == InferRequest("m", decode(body_of(entry([1]))).request.inputs)


# What is refused

DEEP = b"[" * 100_000

WRONG = [
    (b"", "JSON is wrong"),
    (b"null", "JSON is wrong"),
    (b"[]", "JSON is wrong"),
    (b"{}", "missing required field `inputs`"),
    (b"{\"inputs\":[", "JSON is wrong"),
    (b"\xff\xfe", "JSON is wrong"),
    (b'{"inputs":[],"x":' + DEEP, "nested too deeply"),
    (b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + DEEP + b"]" * 100_000 + b"}]}", "deep"),
    (b'{"inputs":[{"name":"\xff","shape":[1],"datatype":"FP32","data":[1]}]}', "no UTF-8"),
    (b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[NaN]}]}', "JSON is wrong"),
    (b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1e999]}]}', "no flat or nested array of FP32"),
    (body_of(entry([1], datatype="FP33")), r"Invalid enum value 'FP33'.*inputs\[0\].datatype"),
    (body_of(entry([1], shape=["1"])), r"Expected `int`, got `str` - at `\$.inputs\[0\].shape"),
    (body_of(entry([1], shape=[1.5])), "Expected `int`, got `float`"),
    (body_of(entry([1], shape=[-1])), "negative length"),
    (body_of(entry([1], shape=[1] * 17)), "17 dimensions; at most 16"),
    (body_of(entry([1], shape=[10**30])), "max_elements"),
    (body_of(entry([1], shape=[10**6])), "1 elements"),
    (body_of(entry()), "has no data"),
    (body_of(entry([1, 2])), r"shape is \[1\], but its data is 2 elements"),
    (body_of(entry([[1, 2]], shape=(2, 1))), r"nested as \[1, 2\]"),
    (body_of(entry([[1, 2], [3]], shape=(2, 2))), "no flat or nested"),
    (body_of(entry([[[1]]], shape=(1, 1))), "no flat or nested"),
    (body_of(entry([["a"], ["b", "c"]], (2, 2), "BYTES")), "no flat or nested array of BYTES"),
    (body_of(entry("1")), "no flat or nested"),
    (body_of(entry({"a": 1})), "no flat or nested"),
    (body_of(entry([True])), "no flat or nested"),
    (body_of(entry(["1"])), "no flat or nested"),
    (body_of(entry([None])), "no flat or nested"),
    (body_of(entry([1e39])), "does not fit into FP32"),
    (body_of(entry([1], datatype="BOOL")), "no flat or nested array of BOOL"),
    (body_of(entry([1.5], datatype="INT64")), "no flat or nested array of INT64"),
    (body_of(entry([2**63], datatype="INT64")), "no flat or nested array of INT64"),
    (body_of(entry([300], datatype="UINT8")), "does not fit into UINT8"),
    (body_of(entry([-1], datatype="UINT32")), "does not fit into UINT32"),
    (body_of(entry([-1], datatype="UINT64")), "no flat or nested array of UINT64"),
    (body_of(entry([2**64], datatype="UINT64")), "no flat or nested array of UINT64"),
    (body_of(entry([-129], datatype="INT8")), "does not fit into INT8"),
    (body_of(entry([1], datatype="FP16")), "FP16 has no JSON form"),
    (body_of(entry([1], datatype="BF16")), "BF16 has no JSON form"),
    (body_of(entry([1], datatype="BYTES")), "no flat or nested array of BYTES"),
    (body_of(entry([1], parameters={"binary_data_size": 4})), "both JSON data and a binary_data_size"),
    (body_of(entry(parameters={"binary_data_size": -1})), "binary_data_size must be"),
    (body_of(entry(parameters={"binary_data_size": True})), "binary_data_size must be"),
    (body_of(entry(parameters={"binary_data_size": "4"})), "binary_data_size must be"),
    (body_of(entry(parameters={"binary_data_size": 4})), "cut short"),
    (body_of(entry(parameters={"binary_data_size": 10**30})), "cut short"),
    (body_of(entry([1], parameters={"x": {"y": 1}})), "Expected"),
    (body_of(entry([1]), parameters={"binary_data_output": 1}), "'binary_data_output' must be true or false"),
    (body_of(entry([1]), outputs=[{"name": "y", "parameters": {"binary_data": "yes"}}]), "'binary_data' must be"),
    (body_of(entry([1]), outputs=[{}]), "missing required field `name`"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_body_is_refused_with_the_reason(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        decode(body)
    assert len(refused.value.message) < 1000


def test_whitespace_of_any_length_does_not_hide_how_data_is_nested() -> None:
    body = body_of(entry([1, 2], (1, 2))).replace(b"[1, 2]}", b" " * 500 + b"[" + b" " * 500 + b"[1, 2]]}")
    (tensor,) = decode(body).request.inputs
    assert bytes(tensor.raw) == struct.pack("<2f", 1, 2)


def test_binary_data_must_be_all_there_and_no_more() -> None:
    header = body_of(entry(parameters={"binary_data_size": 4}))
    with pytest.raises(InvalidRequest, match="cut short"):
        decode(header + b"123", len(header))
    with pytest.raises(InvalidRequest, match="take 4 bytes of the binary part, but 5 came"):
        decode(header + b"12345", len(header))
    decode(header + b"1234", len(header))


def test_shared_memory_is_not_supported() -> None:
    with pytest.raises(NotSupported):
        decode(body_of(entry(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 4})))
    into = {"name": "y", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 4}}
    with pytest.raises(NotSupported):
        decode(body_of(entry([1.0]), outputs=[{"name": "z"}, into]))


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(1, 200)))
def test_any_bytes_are_a_request_or_are_refused(body: bytes, header_length: int | None) -> None:
    with pytest.raises(InvalidRequest):
        decode(body, header_length)


@pytest.mark.parametrize(("text", "wanted"), [(None, None), ("0", 0), ("7", 7), ("10", 10)])
def test_the_length_of_the_json_is_a_number_within_the_body(text: str | None, wanted: int | None) -> None:
    assert header_length_of(text, 10) == wanted


@pytest.mark.parametrize("text", ["", "-1", "11", "abc", "1.0", "1e1", "٣", "9" * 5000])
def test_any_other_length_of_the_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="Inference-Header-Content-Length"):
        header_length_of(text, 10)


# A body that is nothing but bytes


def of_one_input(datatype: Datatype, *shape: int | str) -> Manifest:
    return Manifest("one", "1", (TensorSpec("x", datatype, shape),), (), (), Cost("items", "x"))


@pytest.mark.parametrize(("shape", "elements", "wanted"), [
    (("n",), 5, (5,)),
    (("batch", 1, 8, 8), 128, (2, 1, 8, 8)),
    (("batch", "sequence"), 24, (1, 24)),
    (("batch", 3, "width"), 12, (1, 3, 4)),
    ((2, 2), 4, (2, 2)),
    ((), 1, ()),
    (("n",), 0, (0,)),
])  # fmt: skip
def test_a_raw_body_gets_the_one_shape_that_its_size_fits(
    shape: tuple[int | str, ...], elements: int, wanted: tuple[int, ...]
) -> None:
    decoded = decode_raw_request(b"\0" * 4 * elements, of_one_input(Datatype.FP32, *shape))
    assert decoded.request.inputs[0].shape == wanted
    assert prod(wanted) == elements
    assert "anything" in decoded.binary


def test_a_raw_text_gets_its_length() -> None:
    (tensor,) = decode_raw_request(b"hello", of_one_input(Datatype.BYTES, "n")).request.inputs
    assert (tensor.shape, tensor.raw) == ((1,), struct.pack("<I", 5) + b"hello")


@pytest.mark.parametrize(("manifest", "size", "words"), [
    (minilm(), 8, "needs a model of one input; 'minilm' has 2"),
    (digits(), 4 * 65, "65 elements fit no shape"),
    (digits(), 3, "no whole number of FP32 elements"),
    (of_one_input(Datatype.FP32, "a", "b", "c"), 4, "3 free axes"),
    (of_one_input(Datatype.FP32, 1, "a", "b"), 4, "2 free axes"),
    (of_one_input(Datatype.FP32, "n", 0), 4, "fit no shape"),
])  # fmt: skip
def test_a_raw_body_that_tells_no_shape_is_refused(manifest: Manifest, size: int, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decode_raw_request(b"\0" * size, manifest)


# Answers


@pytest.mark.slow
@given(several(), PARAMETERS)
def test_a_binary_answer_holds_every_byte_in_order(
    outputs: tuple[Tensor, ...], parameters: dict[str, Parameter]
) -> None:
    response = InferResponse("m", "1", outputs, "id", parameters)
    encoded = encode_response(response, BinaryOutputs(default=True))
    length = len(encoded.body) if encoded.header_length is None else encoded.header_length
    header = msgspec.json.decode(encoded.body[:length])
    assert (header["model_name"], header["model_version"], header["id"]) == ("m", "1", "id")
    assert header.get("parameters", {}) == parameters
    assert [output["parameters"]["binary_data_size"] for output in header["outputs"]] == [len(t.raw) for t in outputs]
    assert encoded.body[length:] == b"".join(bytes(tensor.raw) for tensor in outputs)
    assert (encoded.header_length is None) is (not outputs)


@given(tensors().filter(lambda tensor: tensor.datatype in JSON_KINDS))
def test_a_json_answer_holds_the_numbers(tensor: Tensor) -> None:
    array = np.frombuffer(tensor.raw, tensor.datatype.numpy_name)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return
    encoded = encode_response(InferResponse("m", "1", (tensor,)), BinaryOutputs())
    (output,) = msgspec.json.decode(encoded.body)["outputs"]
    assert encoded.header_length is None
    assert output["shape"] == list(tensor.shape)
    assert np.array(output["data"], dtype=array.dtype).tobytes() == tensor.raw


def test_an_answer_says_where_it_was_made_beside_what_the_model_said() -> None:
    encoded = encode_response(InferResponse("m", "1", (), parameters={"a": 1}), BinaryOutputs(), {"b": "2"})
    assert msgspec.json.decode(encoded.body)["parameters"] == {"a": 1, "b": "2"}
    assert "id" not in msgspec.json.decode(encoded.body)


def test_texts_are_answered_as_texts() -> None:
    raw = struct.pack("<I", 3) + "né".encode()
    tensor = Tensor("y", Datatype.BYTES, (1,), raw, {"mine": True})
    (output,) = msgspec.json.decode(encode_response(InferResponse("m", "1", (tensor,)), BinaryOutputs()).body)[
        "outputs"
    ]
    assert (output["data"], output["parameters"]) == (["né"], {"mine": True})


@pytest.mark.parametrize(("tensor", "error"), [
    (Tensor("y", Datatype.FP16, (1,), b"12"), InvalidRequest),
    (Tensor("y", Datatype.FP32, (2,), struct.pack("<ff", 1.0, float("inf"))), InvalidRequest),
    (Tensor("y", Datatype.FP64, (1,), struct.pack("<d", float("nan"))), InvalidRequest),
    (Tensor("y", Datatype.BYTES, (1,), struct.pack("<I", 1) + b"\xff"), InvalidRequest),
    (Tensor("y", Datatype.FP32, (2,), b"1234"), BadAnswer),
    (Tensor("y", Datatype.BYTES, (1,), b"\xff"), BadAnswer),
])  # fmt: skip
def test_what_has_no_json_form_is_refused_and_goes_as_binary(tensor: Tensor, error: type[Exception]) -> None:
    response = InferResponse("m", "1", (tensor,))
    with pytest.raises(error):
        encode_response(response, BinaryOutputs())
    assert encode_response(response, BinaryOutputs(named={"y": True})).body.endswith(bytes(tensor.raw))
    assert encode_response(replace(response, outputs=()), BinaryOutputs()).header_length is None

"""Conversion between OIP's protobuf messages and types, without looking at an element.

Tensors travel as `raw_input_contents` and `raw_output_contents`: one bytes per tensor, in their order. Answers are
always raw, since tritonclient reads an answer in typed `contents` as empty. Requests may come in typed `contents`
(kserve's default, hand-written clients): those are turned into bytes once, here. Mixing both in one message is refused:
no reader could say which bytes belong to which tensor.

Parameters are kept, known or not, in every arm of the oneof: tritonclient sends `priority` as uint64 and `timeout` as
int64, kserve knows only three arms.

The same functions serve both ends: `request_*` and `response_*` read what came, `message_*` write what goes. A bad
request is its caller's fault, a bad response its server's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, Protocol

import numpy as np
from google.protobuf.message import DecodeError

from tidegate.oip.check import quoted_input
from tidegate.oip.content_limits import DEFAULT, ContentLimits
from tidegate.oip.grpc.message_bounds import NoMessage, check_infer_request, check_infer_response
from tidegate.oip.parameters import check_not_shared
from tidegate.outcome import BadAnswer, InvalidRequest, ServeError, TooLarge
from tidegate.rpc import oip_pb2
from tidegate.types import (
    NO_PARAMETERS,
    Buffer,
    Datatype,
    InferRequest,
    InferResponse,
    Parameter,
    Parameters,
    RequestedOutput,
    Tensor,
)

_DATATYPES: Final[Mapping[str, Datatype]] = {datatype.value: datatype for datatype in Datatype}

# Which field of `contents` holds which datatype; FP16 and BF16 have none and must come raw.
_CONTENTS: Final[Mapping[Datatype, str]] = {
    Datatype.BOOL: "bool_contents",
    Datatype.UINT8: "uint_contents",
    Datatype.UINT16: "uint_contents",
    Datatype.UINT32: "uint_contents",
    Datatype.UINT64: "uint64_contents",
    Datatype.INT8: "int_contents",
    Datatype.INT16: "int_contents",
    Datatype.INT32: "int_contents",
    Datatype.INT64: "int64_contents",
    Datatype.FP32: "fp32_contents",
    Datatype.FP64: "fp64_contents",
    Datatype.BYTES: "bytes_contents",
}
_UINT64_FROM: Final = 2**63


class _TensorMessage(Protocol):
    """What an input and an output message have in common."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> Iterable[int]: ...
    @property
    def parameters(self) -> Mapping[str, oip_pb2.InferParameter]: ...
    @property
    def contents(self) -> oip_pb2.InferTensorContents: ...


def request_from_bytes(raw: bytes, limits: ContentLimits = DEFAULT) -> InferRequest:
    """The request that came, counted before it is parsed. Raises InvalidRequest, TooLarge or NotSupported."""
    return request_from_message(parse_request(oip_pb2.ModelInferRequest(), raw, limits), limits)


def parse_request(
    message: oip_pb2.ModelInferRequest, raw: bytes, limits: ContentLimits = DEFAULT
) -> oip_pb2.ModelInferRequest:
    """`message`, parsed from `raw`. Raises InvalidRequest or TooLarge."""
    check_infer_request(raw, limits)
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"the bytes that came are no {message.DESCRIPTOR.name}") from error
    return message


def request_from_message(message: oip_pb2.ModelInferRequest, limits: ContentLimits = DEFAULT) -> InferRequest:
    """The request of a message. Raises InvalidRequest, TooLarge or NotSupported; no model is looked at yet."""
    limits.check_count(len(message.inputs), "inputs")
    limits.check_count(len(message.outputs), "outputs")
    tensors = _tensors(message.inputs, message.raw_input_contents, "input", InvalidRequest)
    for tensor in tensors:
        limits.check_shape(tensor.name, tensor.datatype, tensor.shape)
    limits.check_tensors(tensors)
    requested = _requested(message.outputs) if message.outputs else ()
    parameters = _parameters(message.parameters) if message.parameters else NO_PARAMETERS
    for said in (parameters, *[output.parameters for output in requested]):
        if said:
            limits.check_parameters(said)
    return InferRequest(
        model_name=message.model_name,
        inputs=tensors,
        model_version=message.model_version,
        id=message.id,
        outputs=requested,
        parameters=parameters,
    )


def message_from_request(request: InferRequest) -> oip_pb2.ModelInferRequest:
    head = _request_head(
        request.model_name,
        request.model_version,
        tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in request.inputs]),
        tuple([output.name for output in request.outputs]),
    )
    message = oip_pb2.ModelInferRequest.FromString(head)
    message.raw_input_contents.extend([_bytes(tensor.raw) for tensor in request.inputs])
    if request.id:
        message.id = request.id
    for index, tensor in enumerate(request.inputs):
        if tensor.parameters:
            _put(tensor.parameters, message.inputs[index].parameters)
    for index, output in enumerate(request.outputs):
        if output.parameters:
            _put(output.parameters, message.outputs[index].parameters)
    if request.parameters:
        _put(request.parameters, message.parameters)
    return message


@lru_cache(maxsize=1024)
def _request_head(
    model_name: str,
    model_version: str,
    inputs: tuple[tuple[str, Datatype, tuple[int, ...]], ...],
    outputs: tuple[str, ...],
) -> bytes:
    """What is alike from request to request, serialized: reading it back takes a fifth of building it again."""
    message = oip_pb2.ModelInferRequest(model_name=model_name, model_version=model_version)
    for name, datatype, shape in inputs:
        message.inputs.add(name=name, datatype=datatype.value, shape=shape)
    for name in outputs:
        message.outputs.add(name=name)
    return message.SerializeToString()


def response_from_bytes(raw: bytes) -> InferResponse:
    """The answer in these bytes, counted before it is parsed: a device is not trusted. Raises BadAnswer."""
    try:
        check_infer_response(raw, DEFAULT)
        return response_from_message(oip_pb2.ModelInferResponse.FromString(raw))
    except (DecodeError, NoMessage, TooLarge) as error:
        raise BadAnswer(f"{len(raw)} bytes that are no ModelInferResponse: {error}") from error


def response_from_message(message: oip_pb2.ModelInferResponse) -> InferResponse:
    """The answer that a server of our own or a foreign one gave. Raises BadAnswer."""
    return InferResponse(
        model_name=message.model_name,
        model_version=message.model_version,
        outputs=_tensors(message.outputs, message.raw_output_contents, "output", BadAnswer),
        id=message.id,
        parameters=_parameters(message.parameters) if message.parameters else NO_PARAMETERS,
    )


def message_from_response(
    response: InferResponse, extra: Mapping[str, str] | None = None
) -> oip_pb2.ModelInferResponse:
    """The answer as a message; `extra` are further parameters, such as the words of `reply_parameters`."""
    message = oip_pb2.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    for tensor in response.outputs:
        entry = message.outputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
        if tensor.parameters:
            _put(tensor.parameters, entry.parameters)
        message.raw_output_contents.append(_bytes(tensor.raw))
    if response.parameters:
        _put(response.parameters, message.parameters)
    if extra:
        parameters = message.parameters
        for name, text in extra.items():
            parameters[name].string_param = text
    return message


def bytes_from_response(response: InferResponse) -> bytes:
    """The answer as the serialized message; what answers of one shape have in common is serialized once.

    Protobuf joins messages by concatenation, so the rest is written behind it without making a message.
    """
    if response.parameters or any(tensor.parameters for tensor in response.outputs):
        return message_from_response(response).SerializeToString()
    parts: list[Buffer] = [
        _response_head(
            response.model_name,
            response.model_version,
            tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in response.outputs]),
        )
    ]
    if response.id:
        spelled = response.id.encode()
        parts += (_ID_TAG, _varint(len(spelled)), spelled)
    for tensor in response.outputs:
        parts += (_RAW_OUTPUT_TAG, _varint(len(tensor.raw)), tensor.raw)
    return b"".join(parts)


# The tag of a field of bytes: its number, shifted by three bits, and the wire type 2.
_ID_TAG: Final = bytes([oip_pb2.ModelInferResponse.DESCRIPTOR.fields_by_name["id"].number << 3 | 2])
_RAW_OUTPUT_TAG: Final = bytes(
    [oip_pb2.ModelInferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | 2]
)


@lru_cache(maxsize=1024)
def _response_head(
    model_name: str, model_version: str, outputs: tuple[tuple[str, Datatype, tuple[int, ...]], ...]
) -> bytes:
    message = oip_pb2.ModelInferResponse(model_name=model_name, model_version=model_version)
    for name, datatype, shape in outputs:
        message.outputs.add(name=name, datatype=datatype.value, shape=shape)
    return message.SerializeToString()


def _varint(number: int) -> bytes:
    """A length as protobuf writes it: seven bits a byte, the lowest first."""
    if number < 128:
        return bytes((number,))
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


def _tensors(entries: Any, raw: Any, kind: str, fault: Callable[[str], ServeError]) -> tuple[Tensor, ...]:
    if len(entries) > DEFAULT.max_tensors:
        raise fault(f"{len(entries)} {kind}s in one message; at most {DEFAULT.max_tensors} may come")
    if not raw:
        return tuple([_typed_tensor(entry, kind, fault) for entry in entries])
    if len(raw) != len(entries):
        raise fault(f"{len(entries)} {kind}s but {len(raw)} entries of raw_{kind}_contents; there must be one for each")
    # As slices, which are lists: protobuf's own containers take several times as long to walk through.
    return tuple([_raw_tensor(entry, content, kind, fault) for entry, content in zip(entries[:], raw[:], strict=True)])


def _raw_tensor(entry: Any, content: bytes, kind: str, fault: Callable[[str], ServeError]) -> Tensor:
    # Spelled out for the common case: this is the gateway's hottest loop beside grpc's own.
    datatype = _DATATYPES.get(entry.datatype)
    if datatype is None or entry.parameters or entry.HasField("contents"):
        return _rare_raw_tensor(entry, content, kind, fault)
    return Tensor(entry.name, datatype, tuple(entry.shape[:]), content, NO_PARAMETERS)


def _rare_raw_tensor(entry: Any, content: bytes, kind: str, fault: Callable[[str], ServeError]) -> Tensor:
    if entry.HasField("contents"):
        raise fault(f"{kind} {quoted_input(entry.name)} has typed contents beside raw_{kind}_contents; use one of them")
    return _tensor(entry, content, kind, fault)


def _typed_tensor(entry: Any, kind: str, fault: Callable[[str], ServeError]) -> Tensor:
    return _tensor(entry, _raw_from_contents(entry, kind, fault), kind, fault)


def _tensor(entry: _TensorMessage, raw: Buffer, kind: str, fault: Callable[[str], ServeError]) -> Tensor:
    parameters = NO_PARAMETERS
    if entry.parameters:
        parameters = _parameters(entry.parameters)
        check_not_shared(parameters)
    return Tensor(entry.name, _datatype(entry, kind, fault), tuple(entry.shape), raw, parameters)


def _datatype(entry: _TensorMessage, kind: str, fault: Callable[[str], ServeError]) -> Datatype:
    datatype = _DATATYPES.get(entry.datatype)
    if datatype is None:
        raise fault(f"{kind} {quoted_input(entry.name)} has an unknown datatype {quoted_input(entry.datatype)}")
    return datatype


def _raw_from_contents(entry: Any, kind: str, fault: Callable[[str], ServeError]) -> bytes:
    """The bytes of typed contents; the caller checks the count of elements against the shape."""
    datatype = _datatype(entry, kind, fault)
    field = _CONTENTS.get(datatype)
    if field is None:
        raise fault(
            f"{kind} {quoted_input(entry.name)}: {datatype.value} has no typed contents; send raw_{kind}_contents"
        )
    if any(descriptor.name != field for descriptor, _ in entry.contents.ListFields()):
        raise fault(
            f"{kind} {quoted_input(entry.name)} is {datatype.value}, so its elements must be in contents.{field}"
        )
    values = getattr(entry.contents, field)
    if datatype is Datatype.BYTES:
        return b"".join([struct.pack("<I", len(item)) + item for item in values])
    return _packed(values, datatype, entry.name, kind, fault)


def _packed(values: Any, datatype: Datatype, name: str, kind: str, fault: Callable[[str], ServeError]) -> bytes:
    wide = np.array(values, dtype=_WIDE[_CONTENTS[datatype]])
    narrow = wide.astype(datatype.numpy_name)
    # INT8 and INT16 share int32's field, so a value may not fit; floats are their own width already.
    if narrow.itemsize < wide.itemsize and not np.array_equal(narrow, wide):
        raise fault(f"{kind} {quoted_input(name)}: an element does not fit into {datatype.value}")
    return narrow.tobytes()


_WIDE: Final[Mapping[str, str]] = {
    "bool_contents": "?",
    "uint_contents": "<u4",
    "uint64_contents": "<u8",
    "int_contents": "<i4",
    "int64_contents": "<i8",
    "fp32_contents": "<f4",
    "fp64_contents": "<f8",
}


def _requested(outputs: Any) -> tuple[RequestedOutput, ...]:
    return tuple([_requested_output(output) for output in outputs])


def _requested_output(output: Any) -> RequestedOutput:
    if not output.parameters:
        return RequestedOutput(output.name)
    parameters = _parameters(output.parameters)
    check_not_shared(parameters)
    return RequestedOutput(output.name, parameters)


def _parameters(entries: Mapping[str, oip_pb2.InferParameter]) -> Parameters:
    parameters: dict[str, Parameter] = {}
    for name, entry in entries.items():
        arm = entry.WhichOneof("parameter_choice")
        if arm is not None:
            parameters[name] = getattr(entry, arm)
    return parameters


def _put(parameters: Parameters, into: Any) -> None:
    for name, value in parameters.items():
        if isinstance(value, bool):
            into[name].bool_param = value
        elif isinstance(value, int):
            setattr(into[name], "int64_param" if value < _UINT64_FROM else "uint64_param", value)
        elif isinstance(value, float):
            into[name].double_param = value
        else:
            into[name].string_param = value


def _bytes(raw: Buffer) -> bytes:
    return raw if isinstance(raw, bytes) else bytes(raw)

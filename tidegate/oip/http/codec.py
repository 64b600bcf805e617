"""Conversion between OIP's HTTP bodies and types: JSON, and the extension in which binary tensors follow the JSON.

    Inference-Header-Content-Length: N  →  N bytes of JSON, then the tensors' bytes in the order of `inputs`
    no such header                      →  JSON alone, tensors as numbers, flat or nested by their shape
    N = 0                               →  the body is the one input's bytes and nothing else

A binary tensor becomes a `memoryview` of the body: it is never copied nor decoded here. The JSON is read by one typed
decoder that leaves each `data` alone until its datatype is known, and then turned into bytes (`json_data.py`). How
much it holds and how deep it goes is counted before (`json_bounds.py`), and what came is compared with
`tidegate/oip/content_limits.py` before anything is made of it; a parser's recursion limit is a caller's error like any
other.

`binary_data_size`, `binary_data` and `binary_data_output` say how bytes lay in this body, so they end here; all other
parameters, known or not, stay with the request.

Cost: JSON of tens of megabytes holds the event loop for tenths of a second. Such clients should send binary.

Source: Triton's binary tensor data extension.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Final

import msgspec

from tidegate.models.manifest import Manifest
from tidegate.oip.check import quoted_input
from tidegate.oip.content_limits import DEFAULT, ContentLimits
from tidegate.oip.http.json_bounds import check_json
from tidegate.oip.http.json_data import InputJson, check_json_form, json_of, raw_of
from tidegate.oip.parameters import check_not_shared, checked
from tidegate.outcome import InvalidRequest
from tidegate.types import (
    NO_PARAMETERS,
    Buffer,
    Datatype,
    InferRequest,
    InferResponse,
    Parameters,
    RequestedOutput,
    Tensor,
)

HEADER_LENGTH_KEY: Final = "Inference-Header-Content-Length"

_SIZE: Final = "binary_data_size"
_BINARY: Final = "binary_data"
_BINARY_ALL: Final = "binary_data_output"
_NONE_NAMED: Final[Mapping[str, bool]] = MappingProxyType({})


class BinaryOutputs(msgspec.Struct, frozen=True):
    """Which outputs the caller wants as bytes behind the JSON; `named` overrides `default`."""

    default: bool = False
    named: Mapping[str, bool] = _NONE_NAMED

    def __contains__(self, name: str) -> bool:
        return self.named.get(name, self.default)


class Decoded(msgspec.Struct, frozen=True):
    request: InferRequest
    binary: BinaryOutputs


class Encoded(msgspec.Struct, frozen=True):
    """A response's body; `header_length` is the length of the JSON if binary tensors follow it."""

    body: bytes
    header_length: int | None = None


class _OutputJson(msgspec.Struct):
    name: str
    parameters: dict[str, bool | int | float | str] | None = None


class RequestJson(msgspec.Struct):
    inputs: list[InputJson]
    outputs: list[_OutputJson] | None = None
    id: str | None = None
    parameters: dict[str, bool | int | float | str] | None = None


_decode_json = msgspec.json.Decoder(RequestJson).decode
_encode_json = msgspec.json.Encoder().encode


def header_length_of(text: str | None, size: int) -> int | None:
    """The length of the JSON part from its header; None without that header. Raises InvalidRequest."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15) or int(text) > size:
        raise InvalidRequest(
            f"header {HEADER_LENGTH_KEY} must be a length from 0 to the body's {size} bytes, got {quoted_input(text)}"
        )
    return int(text)


def decode_request(
    body: Buffer,
    *,
    header_length: int | None,
    model_name: str,
    model_version: str = "",
    limits: ContentLimits = DEFAULT,
) -> Decoded:
    """The request in a body of JSON, or of `header_length` > 0 bytes of JSON and then tensors.

    Raises:
        InvalidRequest: the JSON, a tensor's data or the sizes are wrong; nothing is checked against a model yet.
        TooLarge: it holds more than `limits` allow.
        NotSupported: a tensor lies in shared memory, or is to be put there.
    """
    view = memoryview(body)
    text = view if header_length is None else view[:header_length]
    check_json(text, limits)
    json = _parse(text)
    _check_counts(json, limits)
    outputs = _binary_outputs(json)  # before its words are taken off the parameters
    binary = view[len(view) if header_length is None else header_length :]
    request = InferRequest(
        model_name=model_name,
        inputs=_tensors(json.inputs, binary, limits),
        model_version=model_version,
        id=json.id or "",
        outputs=tuple([_requested(output) for output in json.outputs]) if json.outputs else (),
        parameters=_without(json.parameters, _BINARY_ALL),
    )
    return Decoded(request, outputs)


def decode_raw_request(body: Buffer, manifest: Manifest, limits: ContentLimits = DEFAULT) -> Decoded:
    """The request of a body that is nothing but its one input's bytes (a header length of 0).

    At most one length can follow from a size: a first axis beside another free one is taken as a batch of 1.

    Raises:
        InvalidRequest: the model has several inputs or too many free axes, or the size fits no shape.
    """
    if len(manifest.inputs) != 1:
        raise InvalidRequest(
            f"a raw binary body needs a model of one input; {manifest.name!r} has {len(manifest.inputs)}"
        )
    spec = manifest.inputs[0]
    if spec.datatype is Datatype.BYTES:
        # One string, for which the caller sends no length of its own.
        raw: Buffer = struct.pack("<I", len(body)) + bytes(body)
        shape = _raw_shape(spec.name, spec.shape, 1)
    else:
        raw = memoryview(body)
        if len(raw) % spec.datatype.itemsize:
            raise InvalidRequest(f"{len(raw)} bytes are no whole number of {spec.datatype.value} elements")
        shape = _raw_shape(spec.name, spec.shape, len(raw) // spec.datatype.itemsize)
    request = InferRequest(manifest.name, (Tensor(spec.name, spec.datatype, shape, raw),), manifest.version)
    limits.check_shape(spec.name, spec.datatype, shape)
    limits.check_tensors(request.inputs)
    return Decoded(request, BinaryOutputs(default=True))


def check_answerable(decoded: Decoded, manifest: Manifest, classes: Container[str]) -> None:
    """Refuse, before it is computed, an answer that could not be written. Raises InvalidRequest.

    Args:
        classes: the outputs of which classes are asked, which are text.
    """
    binary, named = decoded.binary, {output.name for output in decoded.request.outputs}
    if not named and (manifest.sequence is not None or manifest.generative is not None):
        return  # not all that they give is answered unless it is named
    for spec in manifest.outputs:
        if (not named or spec.name in named) and spec.name not in binary and spec.name not in classes:
            check_json_form(spec.name, spec.datatype)


def encode_response(response: InferResponse, binary: BinaryOutputs, extra: Mapping[str, str] | None = None) -> Encoded:
    """The response's body; `extra` are further parameters, such as the words of `reply_parameters`.

    Raises:
        InvalidRequest: an output has no JSON form, so the caller must ask for it as binary.
        BadAnswer: an output's bytes do not fit its shape.
    """
    blobs: list[Buffer] = []
    outputs = [_output_json(tensor, tensor.name in binary, blobs) for tensor in response.outputs]
    json: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        json["id"] = response.id
    if response.parameters or extra:
        json["parameters"] = {**response.parameters, **(extra or {})}
    json["outputs"] = outputs
    header = _encode_json(json)
    if not blobs:
        return Encoded(header)
    return Encoded(b"".join((header, *blobs)), len(header))


# Reading


def _parse(json: memoryview) -> RequestJson:
    try:
        return _decode_json(json)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the request's JSON is wrong: {error}") from error
    except (RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest("the request's JSON is nested too deeply or is no UTF-8") from error


def _check_counts(json: RequestJson, limits: ContentLimits) -> None:
    limits.check_count(len(json.inputs), "inputs")
    limits.check_count(len(json.outputs or ()), "outputs")
    for output in json.outputs or ():
        if output.parameters:
            limits.check_parameters(output.parameters)
    if json.parameters:
        limits.check_parameters(json.parameters)


def _tensors(entries: list[InputJson], binary: memoryview, limits: ContentLimits) -> tuple[Tensor, ...]:
    at, tensors = 0, []
    for entry in entries:
        limits.check_shape(entry.name, entry.datatype, entry.shape)
        size = _binary_size(entry)
        if size is None:
            raw: Buffer = raw_of(entry)
        else:
            raw = binary[at : at + size]
            at += size
        if at > len(binary):
            raise InvalidRequest(
                f"the binary part is cut short: input {quoted_input(entry.name)} ends at byte {at}, "
                f"but only {len(binary)} came"
            )
        tensors.append(Tensor(entry.name, entry.datatype, entry.shape, raw, _without(entry.parameters, _SIZE)))
    if at != len(binary):
        raise InvalidRequest(f"the inputs take {at} bytes of the binary part, but {len(binary)} came")
    limits.check_tensors(tensors)
    return tuple(tensors)


def _binary_size(entry: InputJson) -> int | None:
    """The size of an input's binary part; None if its data is JSON."""
    parameters = entry.parameters
    if parameters is None:
        return None
    check_not_shared(parameters)
    size = parameters.get(_SIZE)
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidRequest(
            f"input {quoted_input(entry.name)}: {_SIZE} must be a whole number of bytes, got {quoted_input(size)}"
        )
    if len(entry.data):
        raise InvalidRequest(f"input {quoted_input(entry.name)} has both JSON data and a {_SIZE}; use one of them")
    return size


def _requested(output: _OutputJson) -> RequestedOutput:
    if output.parameters:
        check_not_shared(output.parameters)
    return RequestedOutput(output.name, _without(output.parameters, _BINARY))


def _binary_outputs(json: RequestJson) -> BinaryOutputs:
    default = _flag(json.parameters, _BINARY_ALL)
    if not json.outputs:
        return BinaryOutputs(default)
    named = {
        output.name: _flag(output.parameters, _BINARY)
        for output in json.outputs
        if output.parameters and _BINARY in output.parameters
    }
    return BinaryOutputs(default, named)


def _flag(parameters: Mapping[str, Any] | None, name: str) -> bool:
    value = parameters.get(name, False) if parameters else False
    if not isinstance(value, bool):
        raise InvalidRequest(f"parameter {name!r} must be true or false, got {quoted_input(value)}")
    return value


def _without(parameters: dict[str, Any] | None, name: str) -> Parameters:
    if not parameters:
        return NO_PARAMETERS
    parameters.pop(name, None)
    return checked(parameters) or NO_PARAMETERS


def _raw_shape(name: str, entries: tuple[int | str, ...], elements: int) -> tuple[int, ...]:
    free = [index for index, entry in enumerate(entries) if isinstance(entry, str)]
    shape = [entry if isinstance(entry, int) else 1 for entry in entries]
    if len(free) == 2 and free[0] == 0:
        free = free[1:]
    if len(free) > 1:
        raise InvalidRequest(f"input {name!r} has {len(free)} free axes, so a raw binary body cannot tell its shape")
    fixed = prod(shape)
    if free and fixed:
        shape[free[0]] = elements // fixed
    if prod(shape) != elements:
        raise InvalidRequest(f"input {name!r}: {elements} elements fit no shape {list(entries)}")
    return tuple(shape)


# Writing


def _output_json(tensor: Tensor, binary: bool, blobs: list[Buffer]) -> dict[str, Any]:
    json: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": tensor.shape}
    if binary:
        json["parameters"] = {**tensor.parameters, _SIZE: len(tensor.raw)}
        blobs.append(tensor.raw)
        return json
    if tensor.parameters:
        json["parameters"] = dict(tensor.parameters)
    json["data"] = json_of(tensor)
    return json

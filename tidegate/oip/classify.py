"""OIP's classification extension: the top classes of an output as strings "value:index", best first.

It is requested by the output parameter `classification: k`. The server that took the request works it out from the
tensor that the model gave, so that no target need know of it: the parameter is taken off the request that is passed on,
or a foreign server behind us would classify first. Rows are the first axis where there is more than one; labels are not
kept, so Triton's third part is absent.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from tidegate.arrays import tensor_to_array
from tidegate.oip.check import quoted_input
from tidegate.outcome import InvalidRequest
from tidegate.types import Datatype, InferRequest, InferResponse, RequestedOutput, Tensor

PARAMETER: Final = "classification"
MOST_CLASSES: Final = 4096  # of a row: each is written as text, and one answer must not keep a core for seconds
_TIMES_AS_LONG: Final = 4  # to sort a row, as to encode its bytes
_BYTES_PER_CLASS: Final = 250  # to write one as text, as to encode so many bytes


def work_bytes(response: InferResponse, wanted: Mapping[str, int]) -> int:
    """The bytes of an answer, as what they cost to encode: more where classes are `wanted` of it."""
    if not wanted:
        return response.size_bytes
    words = 0
    for tensor in response.outputs:
        count = wanted.get(tensor.name, 0)
        if count and tensor.shape:
            rows, length = (tensor.shape[0], prod(tensor.shape[1:])) if len(tensor.shape) > 1 else (1, tensor.shape[0])
            words += rows * min(count, length)
    return response.size_bytes * _TIMES_AS_LONG + words * _BYTES_PER_CLASS


def wanted_classes(request: InferRequest) -> dict[str, int]:
    """The number of classes requested of each output. Raises InvalidRequest if one is no whole number."""
    return {
        output.name: count
        for output in request.outputs
        if PARAMETER in output.parameters and (count := _count(output)) > 0
    }


def without_classes(request: InferRequest) -> InferRequest:
    """The request as a target should see it."""
    return replace(request, outputs=tuple(_plain(output) for output in request.outputs))


def with_classes(response: InferResponse, wanted: Mapping[str, int]) -> InferResponse:
    """The answer with the wanted outputs replaced by their classes. Raises InvalidRequest for one without numbers."""
    return replace(
        response,
        outputs=tuple(
            _classes(tensor, wanted[tensor.name]) if tensor.name in wanted else tensor for tensor in response.outputs
        ),
    )


def _count(output: RequestedOutput) -> int:
    value = output.parameters[PARAMETER]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_CLASSES:
        raise InvalidRequest(
            f"output {quoted_input(output.name)}: parameter 'classification' must be a whole number of at most "
            f"{MOST_CLASSES}, got {quoted_input(value)}"
        )
    return value


def _plain(output: RequestedOutput) -> RequestedOutput:
    if PARAMETER not in output.parameters:
        return output
    return replace(output, parameters={name: value for name, value in output.parameters.items() if name != PARAMETER})


def _classes(tensor: Tensor, count: int) -> Tensor:
    if tensor.datatype in (Datatype.BYTES, Datatype.BF16):
        raise InvalidRequest(f"output {tensor.name!r} is {tensor.datatype.value} and cannot be classified")
    values = tensor_to_array(tensor)
    rows = values.reshape(values.shape[0], -1) if values.ndim > 1 and values.size else values.reshape(1, -1)
    count = min(count, rows.shape[1])
    raw = b"".join(_packed_row(row, count) for row in rows)
    shape = (rows.shape[0], count) if values.ndim > 1 else (count,)
    return Tensor(tensor.name, Datatype.BYTES, shape, raw)


def _packed_row(row: NDArray[Any], count: int) -> bytes:
    # Stable on the negated values: of equal classes the one with the smaller index comes first.
    best = np.argsort(-row.astype(np.float64), kind="stable")[:count]
    words = [f"{float(row[index]):f}:{int(index)}".encode() for index in best]
    return b"".join([struct.pack("<I", len(word)) + word for word in words])

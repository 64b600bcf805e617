"""Limits on the content of one request, from any sender and in any form, checked before memory is allocated for it.

A manifest allows far less than any of this, but it is looked at last. Until then a few bytes can ask for much: a shape
says a size that never came, a JSON list of empty lists takes thirty times its text, a protobuf message of two-byte
entries fifty times its bytes. So whoever reads a wire format counts what is there (`tidegate/oip/http/json_bounds.py`,
`tidegate/oip/grpc/message_bounds.py`) and compares it with these numbers, and allocates for what came, never for what
was claimed.

Each number's name is its key in the section `limits` of a configuration; errors name it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Final

from tidegate.arrays import walk_bytes
from tidegate.oip.check import quoted_input
from tidegate.outcome import InvalidRequest, TooLarge
from tidegate.types import Datatype, Parameters, Tensor

# Of the JSON of a request for text. A token has some four characters, and each may come as an escape of six bytes.
BYTES_PER_PROMPT_TOKEN: Final = 64
MIN_PROMPT_BYTES: Final = 2**21
# Beside token ids: four thousand messages, half of them calls of tools, have 20,000 values, and 128 tools as many.
MAX_CHAT_VALUES: Final = 2**16


@dataclass(frozen=True, slots=True)
class ContentLimits:
    """Counts are of one request.

    Attributes:
        max_json_bytes: of a JSON body, or of the JSON before binary tensors, or of a message without its raw contents.
        max_json_elements: values in JSON, and elements in typed contents: each becomes an object of some 32 bytes.
        max_strings: elements of BYTES tensors together: each has its own length, and is walked over one by one.
        max_string_bytes: of one element of a BYTES tensor, and of one parameter.
        max_prompt_tokens: of a generation, where its model's context has room for more.
        max_output_tokens: the same of its answer.
    """

    max_tensors: int = 1024
    max_rank: int = 16
    max_elements: int = 2**26
    max_strings: int = 2**16
    max_string_bytes: int = 8 * 2**20
    max_parameters: int = 256
    max_json_bytes: int = 32 * 2**20
    max_json_elements: int = 2**21
    max_json_depth: int = 32
    max_prompt_tokens: int = 2**17
    max_output_tokens: int = 2**16

    @property
    def max_prompt_bytes(self) -> int:
        """The largest body of a request for text: it has no tensors, and need not be as large as one with them."""
        return max(MIN_PROMPT_BYTES, BYTES_PER_PROMPT_TOKEN * self.max_prompt_tokens)

    def max_prompt_values(self, *, ids: bool) -> int:
        """The most values in it. Args: ids: whether its prompt may be token ids, each of which is a value."""
        return min(self.max_json_elements, MAX_CHAT_VALUES + (self.max_prompt_tokens if ids else 0))

    def check_count(self, count: int, what: str) -> None:
        """Raises InvalidRequest for more tensors or requested outputs than the limit."""
        if count > self.max_tensors:
            raise InvalidRequest(f"{count} {what} in one request; at most {self.max_tensors} may come (max_tensors)")

    def check_shape(self, name: str, datatype: Datatype, shape: tuple[int, ...]) -> None:
        """Raises InvalidRequest for a shape that no tensor here may have, whatever its bytes are."""
        if len(shape) > self.max_rank:
            raise InvalidRequest(
                f"input {quoted_input(name)} has {len(shape)} dimensions; at most {self.max_rank} may be (max_rank)"
            )
        if shape and min(shape) < 0:
            raise InvalidRequest(
                f"input {quoted_input(name)} has a negative length in its shape {quoted_input(list(shape))}"
            )
        limit, key = self.max_elements, "max_elements"
        if datatype is Datatype.BYTES:
            limit, key = self.max_strings, "max_strings"
        if prod(shape) > limit:
            raise InvalidRequest(
                f"input {quoted_input(name)}: {datatype.value}{quoted_input(list(shape))} has more than {limit} "
                f"elements ({key})"
            )

    def check_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Raises InvalidRequest or TooLarge for strings that are too many or too long, and for too many parameters."""
        strings = 0
        for tensor in tensors:
            if tensor.parameters:
                self.check_parameters(tensor.parameters)
            if tensor.datatype is Datatype.BYTES:
                strings = self._check_strings(tensor, strings)

    def check_parameters(self, parameters: Parameters) -> None:
        if len(parameters) > self.max_parameters:
            raise InvalidRequest(
                f"{len(parameters)} parameters in one place; at most {self.max_parameters} may be (max_parameters)"
            )
        for name, value in parameters.items():
            self._check_string(len(name), "a parameter's name")
            if isinstance(value, str):
                self._check_string(len(value), f"parameter {quoted_input(name)}")

    def _check_strings(self, tensor: Tensor, before: int) -> int:
        count = before
        for size_bytes in walk_bytes(tensor.raw, name=tensor.name):
            count += 1
            if count > self.max_strings:
                raise TooLarge(f"input {quoted_input(tensor.name)}: more than {self.max_strings} strings (max_strings)")
            self._check_string(size_bytes, f"an element of input {quoted_input(tensor.name)}")
        return count

    def _check_string(self, size_bytes: int, what: str) -> None:
        if size_bytes > self.max_string_bytes:
            raise TooLarge(f"{what} has {size_bytes} bytes; at most {self.max_string_bytes} may be (max_string_bytes)")


DEFAULT: Final = ContentLimits()

"""Request parameters that every protocol can carry: whole numbers of at most 64 bits, and no tensor in shared memory.

JSON writes numbers of any size; a request to a target is a protobuf, whose numbers end at -2^63 and 2^64 - 1. A larger
number must be reported as its caller's fault: refused by the target it would look like a defect of the target, and a
caller could have the target ejected by sending a few.
"""

from __future__ import annotations

from typing import Final

from tidegate.oip.budget import quoted_value
from tidegate.outcome import InvalidRequest, NotSupported
from tidegate.types import Parameters

_SHARED_MEMORY: Final = "shared_memory_region"


def checked(parameters: Parameters) -> Parameters:
    """The parameters themselves. Raises InvalidRequest: a number that cannot be passed on."""
    for name, value in parameters.items():
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise InvalidRequest(f"parameter {quoted_value(name)} must be a number of at most 64 bits")
    return parameters


def check_not_shared(parameters: Parameters) -> None:
    """Raises NotSupported where a tensor's parameters say that it lies, or is to be put, in shared memory."""
    if _SHARED_MEMORY in parameters:
        raise NotSupported("shared memory is not supported: callers and models do not share a machine")

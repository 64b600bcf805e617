"""Request parameters that every protocol can carry: whole numbers have at most 64 bits.

JSON writes numbers of any size; a request to a target is a protobuf, whose numbers end at -2^63 and 2^64 - 1. A larger
number must be reported as its caller's fault: refused by the target it would look like a defect of the target, and a
caller could have the target ejected by sending a few.
"""

from __future__ import annotations

from tidegate.oip.budget import quoted_value
from tidegate.outcome import InvalidRequest
from tidegate.types import Parameters


def checked(parameters: Parameters) -> Parameters:
    """The parameters themselves. Raises InvalidRequest: a number that cannot be passed on."""
    for name, value in parameters.items():
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise InvalidRequest(f"parameter {quoted_value(name)} must be a number of at most 64 bits")
    return parameters

"""The budget and the priority of a request: the least of all the values that its caller sent.

Clients have four ways to name a budget without being changed: our header, OIP's `timeout` parameter (microseconds), the
deadline of the gRPC call, and the read timeout that the OpenAI SDK announces on every request (seconds; its default of
600 is no caller's wish and means none). If a caller sends two, both hold, so the least counts. A model's own default
is not applied here: the host applies it if the caller sent no budget.

A budget that is no positive finite number is refused with its source and value, never ignored: a caller with a typo in
its budget would otherwise wait for ever. The parameter alone may be 0, which is Triton's word for no timeout. Only a
gRPC deadline may come out at zero or below: it simply ran out on the way here, and is refused as late further down.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from tidegate.outcome import InvalidRequest
from tidegate.types import Parameter, Parameters

BUDGET_HEADER: Final = "tidegate-budget-ms"
OPENAI_TIMEOUT_HEADER: Final = "x-stainless-read-timeout"
OPENAI_NO_TIMEOUT_S: Final = 600.0
TIMEOUT_PARAMETER: Final = "timeout"
PRIORITY_PARAMETER: Final = "priority"
MAX_PRIORITY: Final = 255

# Longer is as good as none, and keeps sums with a monotonic clock exact.
MAX_BUDGET_S: Final = 7 * 86400.0

_NUMBER: Final = re.compile(r"(\d{1,15}(\.\d{0,15})?|\.\d{1,15})([eE][+-]?\d{1,2})?", re.ASCII)


def budget_s(headers: Mapping[str, str], parameters: Parameters, remaining_s: float | None = None) -> float | None:
    """The least of the budgets that the caller gave, in seconds; None if it gave none.

    Args:
        headers: HTTP headers or gRPC metadata, with lower-case names.
        parameters: the OIP request's parameters.
        remaining_s: what is left of the gRPC call's deadline.

    Raises:
        InvalidRequest: a budget is no positive finite number.
    """
    least = remaining_s
    if headers:
        least = _least(least, _header_budget_s(headers))
    if TIMEOUT_PARAMETER in parameters:
        least = _least(least, _timeout_s(parameters[TIMEOUT_PARAMETER]))
    return least if least is None else min(least, MAX_BUDGET_S)


def priority_of(parameters: Parameters) -> int:
    """1 is highest, 0 the default. Raises InvalidRequest for anything but a whole number from 0 to MAX_PRIORITY."""
    value = parameters.get(PRIORITY_PARAMETER, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PRIORITY:
        raise InvalidRequest(
            f"parameter {PRIORITY_PARAMETER!r} must be a whole number from 0 to {MAX_PRIORITY}, "
            f"got {quoted_value(value)}"
        )
    return value


def _header_budget_s(headers: Mapping[str, str]) -> float | None:
    least: float | None = None
    text = headers.get(BUDGET_HEADER)
    if text is not None:
        least = positive_number(text, f"header {BUDGET_HEADER}", "milliseconds") / 1e3
    text = headers.get(OPENAI_TIMEOUT_HEADER)
    if text is not None:
        given_s = positive_number(text, f"header {OPENAI_TIMEOUT_HEADER}", "seconds")
        least = least if given_s == OPENAI_NO_TIMEOUT_S else _least(least, given_s)
    return least


def _timeout_s(value: Parameter) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidRequest(
            f"parameter {TIMEOUT_PARAMETER!r} must be a whole number of microseconds, 0 for no timeout, "
            f"got {quoted_value(value)}"
        )
    return min(value, 10**15) / 1e6 if value else None


def positive_number(text: str, source: str, unit: str) -> float:
    """A caller's number. Raises InvalidRequest, naming its source, for all that is not positive and finite."""
    # float() alone would take "nan", "inf" and "1_000".
    number = text.strip()
    value = float(number) if _NUMBER.fullmatch(number) else 0.0
    if not value > 0:
        raise InvalidRequest(f"{source} must be a positive number of {unit}, got {quoted_value(text)}")
    return value


def _least(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def quoted_value(value: object) -> str:
    """A caller's value as an error quotes it: never longer than a line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"

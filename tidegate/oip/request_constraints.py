"""A caller's constraints on its answer: the variant, the least quality, and where the answer may be computed.

Each demand is a header (HTTP, gRPC metadata) or a parameter of the OIP request, by the same name. If a caller sends
two, the stricter counts, as with budgets; two different variants have no stricter one and are refused. A demand that
cannot be read is refused with its value and what is allowed, never ignored: a typo in a pin would let data out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Final

from tidegate.oip.budget import quoted_value
from tidegate.outcome import InvalidRequest, NotSupported
from tidegate.placement_pin import PINS, Pin, stricter
from tidegate.types import Call, Parameter, Parameters

VARIANT_KEY: Final = "tidegate-variant"
VERSION_KEY: Final = "tidegate-version"
PIN_KEY: Final = "tidegate-pin"
MIN_QUALITY_KEY: Final = "tidegate-min-quality"
REQUIRE_KEY: Final = "tidegate-require"
DEFER_KEY: Final = "tidegate-defer"
RESUME_KEY: Final = "tidegate-resume"
MAX_AGE_KEY: Final = "tidegate-max-age-s"
SERIES_KEY: Final = "tidegate-series"
ATTESTED: Final = "attested"

_SERIES: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}", re.ASCII)
_SECONDS: Final = re.compile(r"\d{1,9}(\.\d{0,9})?", re.ASCII)
# float() alone would take "nan", "1_0" and a page of digits.
_SHARE: Final = re.compile(r"[01](\.\d{0,15})?|\.\d{1,15}", re.ASCII)


def variant_of(headers: Mapping[str, str], parameters: Parameters) -> str:
    """The variant that the caller demands; "" takes any. Raises InvalidRequest when header and parameter disagree."""
    return _name(VARIANT_KEY, "a variant's name", headers, parameters)


def version_of(headers: Mapping[str, str], parameters: Parameters) -> str:
    """The version, or its role in a trial, that the caller requires; "" for none. Raises InvalidRequest."""
    return _name(VERSION_KEY, "a version, `candidate` or `standing`", headers, parameters)


def _name(key: str, what: str, headers: Mapping[str, str], parameters: Parameters) -> str:
    by_header = headers.get(key, "").strip() if headers else ""
    by_parameter = parameters.get(key, "")
    if not isinstance(by_parameter, str):
        raise InvalidRequest(f"parameter {key!r} must be {what}, got {quoted_value(by_parameter)}")
    if by_header and by_parameter and by_header != by_parameter:
        raise InvalidRequest(
            f"header {key} demands {quoted_value(by_header)} but the parameter demands {quoted_value(by_parameter)}"
        )
    return by_header or by_parameter


def pin_of(headers: Mapping[str, str], parameters: Parameters) -> Pin:
    """How far the request may go. Raises InvalidRequest for anything but one of `PINS`."""
    pin: Pin = "any"
    if PIN_KEY in headers:
        pin = _pin(headers[PIN_KEY].strip(), f"header {PIN_KEY}")
    if PIN_KEY in parameters:
        pin = stricter(pin, _pin(parameters[PIN_KEY], f"parameter {PIN_KEY!r}"))
    return pin


def min_quality_of(headers: Mapping[str, str], parameters: Parameters) -> float:
    """The least quality that will do, 0 for any. Raises InvalidRequest for anything but a number from 0 to 1."""
    least = 0.0
    if MIN_QUALITY_KEY in headers:
        least = _share(headers[MIN_QUALITY_KEY], f"header {MIN_QUALITY_KEY}")
    if MIN_QUALITY_KEY in parameters:
        least = max(least, _share(parameters[MIN_QUALITY_KEY], f"parameter {MIN_QUALITY_KEY!r}"))
    return least


def attested_of(headers: Mapping[str, str], parameters: Parameters) -> bool:
    """Whether only attested targets qualify. Raises InvalidRequest for any other requirement."""
    required = False
    if REQUIRE_KEY in headers:
        # Sent twice it arrives as a list, with the same meaning as once.
        required = all(_attested(word.strip(), f"header {REQUIRE_KEY}") for word in headers[REQUIRE_KEY].split(","))
    if REQUIRE_KEY in parameters:
        required = _attested(parameters[REQUIRE_KEY], f"parameter {REQUIRE_KEY!r}")
    return required


def defer_of(headers: Mapping[str, str], parameters: Parameters) -> bool:
    """Whether a ticket is accepted if there is no good answer now. Raises InvalidRequest for all but yes and no."""
    wished = False
    if DEFER_KEY in headers:
        wished = _yes(headers[DEFER_KEY].strip(), f"header {DEFER_KEY}")
    if DEFER_KEY in parameters:
        wished = _yes(parameters[DEFER_KEY], f"parameter {DEFER_KEY!r}") or wished
    return wished


def resumes_of(headers: Mapping[str, str], parameters: Parameters) -> bool:
    """Whether another target may go on with an answer that has begun. Raises InvalidRequest for all but two words."""
    may = True
    if RESUME_KEY in headers:
        may = _may_resume(headers[RESUME_KEY].strip(), f"header {RESUME_KEY}")
    if RESUME_KEY in parameters:
        may = _may_resume(parameters[RESUME_KEY], f"parameter {RESUME_KEY!r}") and may
    return may


def max_age_of(headers: Mapping[str, str], parameters: Parameters) -> float:
    """Seconds that an answer from memory may be old; 0: it must be computed. Raises InvalidRequest."""
    most = inf
    if MAX_AGE_KEY in headers:
        most = _seconds(headers[MAX_AGE_KEY], f"header {MAX_AGE_KEY}")
    if MAX_AGE_KEY in parameters:
        most = min(most, _seconds(parameters[MAX_AGE_KEY], f"parameter {MAX_AGE_KEY!r}"))
    return most


def series_of(headers: Mapping[str, str], parameters: Parameters) -> str:
    """The series of which the request is the newest; "" for none. Raises InvalidRequest."""
    series = _name(SERIES_KEY, "a name", headers, parameters)
    if series and not _SERIES.fullmatch(series):
        raise InvalidRequest(f"{SERIES_KEY} must be 1 to 128 letters, digits and . _ : / -, got {quoted_value(series)}")
    return series


def check_is_no_gateways(call: Call, server_name: str) -> None:
    """Raises NotSupported for a requirement that only a gateway can keep: a target knows no evidence but its own."""
    if call.attested:
        raise NotSupported(f"{REQUIRE_KEY}: {server_name} verifies no evidence; ask a gateway, which does")


def _attested(value: Parameter, source: str) -> bool:
    if value != ATTESTED:
        raise InvalidRequest(f"{source} can require {ATTESTED!r} and nothing else, got {quoted_value(value)}")
    return True


def _may_resume(value: Parameter, source: str) -> bool:
    if value not in ("auto", "never"):
        raise InvalidRequest(f"{source} must be auto or never, got {quoted_value(value)}")
    return value == "auto"


def _yes(value: Parameter, source: str) -> bool:
    if value in (True, "1", "true"):  # 1 is True
        return True
    if value in (False, "0", "false"):
        return False
    raise InvalidRequest(f"{source} must be 1 or 0, got {quoted_value(value)}")


def _seconds(value: Parameter, source: str) -> float:
    if isinstance(value, str):
        seconds = float(value) if _SECONDS.fullmatch(value.strip()) else -1.0
    else:
        seconds = -1.0 if isinstance(value, bool) else float(value)
    if not 0.0 <= seconds < inf:
        raise InvalidRequest(f"{source} must be a number of seconds, 0 or more, got {quoted_value(value)}")
    return seconds


def _pin(value: Parameter, source: str) -> Pin:
    for pin in PINS:
        if value == pin:
            return pin
    raise InvalidRequest(f"{source} must be one of {', '.join(PINS)}, got {quoted_value(value)}")


def _share(value: Parameter, source: str) -> float:
    """Numbers, and text that spells one: some clients can send no fraction as a parameter."""
    if isinstance(value, str):
        share = float(value) if _SHARE.fullmatch(value.strip()) else -1.0
    else:
        share = -1.0 if isinstance(value, bool) else float(value)
    if not 0.0 <= share <= 1.0:
        raise InvalidRequest(f"{source} must be a number from 0 to 1, got {quoted_value(value)}")
    return share

"""What any call may ask for beside its input, and the headers that say so."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from tidegate.oip.request_constraints import (
    MAX_AGE_KEY,
    MIN_QUALITY_KEY,
    PIN_KEY,
    REQUIRE_KEY,
    RESUME_KEY,
    SERIES_KEY,
    VARIANT_KEY,
    VERSION_KEY,
)
from tidegate.oip.tenant import TENANT_KEY
from tidegate.oip.token_budgets import TPOT_HEADER, TTFT_HEADER


class CallOptions(TypedDict, total=False):
    """Keywords of every call. Durations are seconds; what is left out is the model's or the gateway's default."""

    budget_s: float | None  # from the call to its whole answer, tries included; overrides the client's own
    ttft_s: float  # of a generation: to its first token
    tpot_s: float  # of a generation: each further token, on average
    pin: Literal["edge", "edge-input", "site", "any"]  # how far the request may go
    variant: str  # only this variant or precision, such as "fp32"
    version: str  # only this version
    min_quality: float  # only variants whose measured quality is at least this, 0 to 1
    require: Literal["attested"]  # only targets with verified evidence
    resume: Literal["auto", "never"]  # whether another target may go on with a lost answer
    max_age_s: float  # how old an answer from the gateway's memory may be; 0: it must be computed
    series: str  # of which this is the newest request: where nothing else answers, its newest answer will do
    tenant: str  # on whose quota, where the credential may say so
    headers: dict[str, str]  # anything else


# By option: its header, and what its number is multiplied by where it has another unit there.
_HEADERS: Final = {
    "pin": PIN_KEY, "variant": VARIANT_KEY, "version": VERSION_KEY, "min_quality": MIN_QUALITY_KEY,
    "require": REQUIRE_KEY, "resume": RESUME_KEY, "tenant": TENANT_KEY, "ttft_s": TTFT_HEADER, "tpot_s": TPOT_HEADER,
    "max_age_s": MAX_AGE_KEY, "series": SERIES_KEY,
}  # fmt: skip
_MILLISECONDS: Final = {"ttft_s", "tpot_s"}


def option_headers(options: CallOptions) -> dict[str, str]:
    """The headers of all options but the budget, which is what is left of it at each try.

    Raises:
        TypeError: an option that no call has; a misspelled demand would otherwise be dropped in silence.
    """
    if unknown := sorted(set(options) - set(CallOptions.__annotations__)):
        raise TypeError(f"no call has the option {unknown[0]!r}; there are {', '.join(CallOptions.__annotations__)}")
    found = dict(options.get("headers", {}))
    for name, header in _HEADERS.items():
        value = options.get(name)
        if value is not None:
            found[header] = f"{float(str(value)) * 1e3:g}" if name in _MILLISECONDS else str(value)
    return found

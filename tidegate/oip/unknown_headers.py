"""Headers that begin with `tidegate-` and mean nothing here are named in the answer: a mistyped budget is none.

    tidegate-warning: unknown tidegate-bugdet-ms, did you mean tidegate-budget-ms

The answer is given all the same, since a newer gateway may know what this one does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

from tidegate.oip.budget import BUDGET_HEADER
from tidegate.oip.call import HOP_KEY
from tidegate.oip.reply import HOME_KEY
from tidegate.oip.request_constraints import (
    DEFER_KEY,
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

WARNING_KEY: Final = "tidegate-warning"
KNOWN: Final = frozenset(
    {
        BUDGET_HEADER,
        DEFER_KEY,
        HOME_KEY,
        HOP_KEY,
        MAX_AGE_KEY,
        MIN_QUALITY_KEY,
        PIN_KEY,
        REQUIRE_KEY,
        RESUME_KEY,
        SERIES_KEY,
        TENANT_KEY,
        TPOT_HEADER,
        TTFT_HEADER,
        VARIANT_KEY,
        VERSION_KEY,
    }
)
_PREFIX: Final = "tidegate-"
_MOST: Final = 3  # are named; a caller that has more wrong finds them one by one
_SHOWN: Final = 64  # characters of each


def warn_of_unknown(words: dict[str, str], headers: Mapping[str, str]) -> None:
    """Add the warning to an answer's words if there is one. Args: headers: what `kept_headers` kept of a request."""
    if not headers or headers.keys() <= KNOWN:
        return
    unknown = [name for name in headers if name.startswith(_PREFIX) and name not in KNOWN]
    if unknown:
        words[WARNING_KEY] = "; ".join(_hint(name[:_SHOWN]) for name in unknown[:_MOST])


def _hint(name: str) -> str:
    close = get_close_matches(name, sorted(KNOWN - {HOP_KEY}), n=1)
    return f"unknown {name}, did you mean {close[0]}" if close else f"unknown {name}"

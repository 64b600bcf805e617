"""The two budgets of a generation's tokens: by when the first is due, and how long each further one may take.

Beside the budget of the whole answer (`budget.py`) a caller may bound what a reader notices: the time to the first
token, and the time for each token after it, on average over the answer. Each is a header of ours, an alias that other
routers have, or a parameter of the OIP request by our name; of several the least counts, and of none the model's own
default. The read timeout that OpenAI's SDK announces bounds the silence between two bytes: of a stream it is a bound on
both, and none on the whole.

They are objectives, not limits: placement and hedging keep them where they can, a miss is counted, and a request is
never refused or ended for one. Only the budget of the whole answer ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from tidegate.models.generative import Generative
from tidegate.oip.budget import (
    MAX_BUDGET_S,
    OPENAI_NO_TIMEOUT_S,
    OPENAI_TIMEOUT_HEADER,
    positive_number,
    quoted_value,
)
from tidegate.outcome import InvalidRequest
from tidegate.types import Parameter, Parameters

TTFT_HEADER: Final = "tidegate-ttft-ms"
TPOT_HEADER: Final = "tidegate-tpot-ms"
TTFT_ALIAS: Final = "x-slo-ttft-ms"
TPOT_ALIAS: Final = "x-slo-tpot-ms"
TOKEN_BUDGET_ALIASES: Final = frozenset({TTFT_ALIAS, TPOT_ALIAS})


class TokenBudgets(NamedTuple):
    """Seconds from arrival to the first token, and for each further one; None: without bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None


def token_budgets(
    headers: Mapping[str, str], parameters: Parameters, generative: Generative | None, *, streamed: bool = False
) -> TokenBudgets:
    """The least of what the caller gave of each, or the model's default.

    Args:
        generative: of the model; None of one whose answers have no tokens, which has neither budget.
        streamed: whether the answer goes to its caller token by token, so that a read timeout bounds its silences.

    Raises:
        InvalidRequest: one of them is no positive finite number, whatever the model is.
    """
    silence_s = _silence_s(headers) if streamed else None
    ttft_s = _least_s(headers, parameters, TTFT_HEADER, TTFT_ALIAS, silence_s)
    tpot_s = _least_s(headers, parameters, TPOT_HEADER, TPOT_ALIAS, silence_s)
    if generative is None:
        return TokenBudgets()
    return TokenBudgets(
        generative.default_ttft_s if ttft_s is None else ttft_s,
        generative.default_tpot_s if tpot_s is None else tpot_s,
    )


def _least_s(
    headers: Mapping[str, str], parameters: Parameters, name: str, alias: str, silence_s: float | None
) -> float | None:
    given = [] if silence_s is None else [silence_s]
    given += [
        positive_number(headers[one], f"header {one}", "milliseconds") / 1e3 for one in (name, alias) if one in headers
    ]
    if name in parameters:
        given.append(_parameter_ms(parameters[name], name) / 1e3)
    return min(MAX_BUDGET_S, *given) if given else None


def _parameter_ms(value: Parameter, name: str) -> float:
    """Numbers, and text that spells one: some clients can send no fraction as a parameter."""
    source = f"parameter {name!r}"
    if isinstance(value, str):
        return positive_number(value, source, "milliseconds")
    if isinstance(value, bool) or not 0.0 < value < float("inf"):
        raise InvalidRequest(f"{source} must be a positive number of milliseconds, got {quoted_value(value)}")
    return float(value)


def _silence_s(headers: Mapping[str, str]) -> float | None:
    text = headers.get(OPENAI_TIMEOUT_HEADER)
    if text is None:
        return None
    given_s = positive_number(text, f"header {OPENAI_TIMEOUT_HEADER}", "seconds")
    return None if given_s == OPENAI_NO_TIMEOUT_S else given_s

"""Which of its three budgets an answered generation kept: of its first token, of each further one, and of the whole.

One place for all that count or show it: metrics, logs, explanations. A budget that a request does not have is neither
kept nor missed, and those of tokens are of answers that came token by token.

Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from tidegate.types import Call


class BudgetsKept(NamedTuple):
    """None: there was no such budget, or nothing was shown before the end."""

    first: bool | None
    next: bool | None
    whole: bool | None

    @property
    def all(self) -> bool:
        """Whether none was missed: such answers a second are goodput."""
        return False not in self


def each_token_s(first_s: float, latency_s: float, tokens: int) -> float | None:
    """Seconds for each token after the first, on average; None where there is none."""
    return max(0.0, latency_s - first_s) / (tokens - 1) if tokens > 1 else None


def budgets_kept(call: Call, first_s: float | None, latency_s: float, tokens: int) -> BudgetsKept:
    """What was kept of the budgets of a call that was answered.

    Args:
        first_s: from the request's arrival to its first token; None of an answer in one piece.
        latency_s: to its end.
    """
    whole = None if call.deadline is None else call.arrived_at + latency_s <= call.deadline
    if first_s is None:
        return BudgetsKept(None, None, whole)
    each_s = each_token_s(first_s, latency_s, tokens)
    return BudgetsKept(
        None if call.ttft_s is None else first_s <= call.ttft_s,
        None if call.tpot_s is None else each_s is None or each_s <= call.tpot_s,
        whole,
    )

"""The commit window holds back the first tokens of a lesser variant's answer until it is known how sure they are.

What a caller was shown cannot be taken back, so a streamed answer can be escalated only before its first token is
shown. The first k tokens say much about the rest: a small model that does not know begins with unlikely tokens. So the
beginning is held, judged by its tokens' probabilities (`tidegate/generate/beginning_confidence.py`), and shown if it
will do. If it will not, a better variant is asked, and whichever of the two may be shown first is the answer:

    held      from the first token of a variant that is judged. Its target goes on computing meanwhile, so a beginning
              that will do is late by the k − 1 tokens that it was held for, and by nothing at its end
    sure      shown
    unsure    a better variant is asked, by the same rules as for whole answers (`escalation.py`); the beginning stays
              held, and is shown if the other one fails, or has said nothing by the end of the window
    the end of the window
              a moment before the first token is due by its budget, or else before the deadline. It is never longer than
              what is held for needs: k tokens at the pace that was predicted `TIMES` over, or the other one's first
              token `PATIENCE` times over, since a caller without a budget for its first token waits as well. Less than
              `LEAST_S` is no stall but a busy moment, of which no prediction of a few milliseconds knows

Nothing that a caller sees depends on a beginning that was not shown: all its tokens are computed in vain, and counted
as such. What is shown at the end of the window though it was unsure, is declared as provisional, as whole answers are.

It can be wrong where a sure beginning goes astray later, and where both variants are sure of the same mistake.
Source: docs/generation.md, "An unsure beginning". Handing on by a small model's own confidence: Chen et al.,
"FrugalGPT" (2023), of whole answers; Gupta et al., "Language Model Cascades: Token-level uncertainty and beyond",
ICLR 2024.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Candidate, Decision
from gateway.core.request.escalation import provisional_due_at
from gateway.core.request.resumption import LEAST_S, shown_in_s

TIMES: Final = 6.0  # what a stalled beginning is held for, of what its tokens should take
PATIENCE: Final = 2.0  # the same of the first token of the better variant


class HeldBeginning(NamedTuple):
    """The attempt whose first tokens are held back, until when at most, and whether they were judged unsure."""

    attempt: int
    due_at: float
    is_unsure: bool = False


def window_ends_at(ask: Ask, arrived_at: float) -> float:
    """The last instant at which to show a beginning, so that it is in time for its caller."""
    first_by = None if ask.generation is None else ask.generation.first_by
    return provisional_due_at(arrived_at, ask.deadline if first_by is None else min(first_by, ask.deadline))


def judged_by(candidate: Candidate, tokens: int, now: float) -> float:
    """The instant by which the first `tokens` of an answer should be here, of which the first is here now."""
    step_s = 0.0 if candidate.tokens is None else candidate.tokens.step_s
    return now + max(LEAST_S, TIMES * tokens * step_s)


def awaited_until(decision: Decision, ends_at: float, due_at: float) -> float | None:
    """Until when a better variant's first token is waited for, where `decision` says; None: it is not worth it.

    Args:
        ends_at: the end of the window.
        due_at: the last instant at which the whole answer is in time.
    """
    chosen = decision.chosen
    if chosen is None or chosen.trust < 1.0:
        return None
    in_s = shown_in_s(chosen)
    in_s += min(in_s, chosen.margin_s)  # the margin is of the whole answer, whose length nobody knows
    if decision.at + in_s > ends_at or decision.at + chosen.finish_s + chosen.margin_s > due_at:
        return None
    return min(ends_at, decision.at + max(LEAST_S, PATIENCE * in_s))

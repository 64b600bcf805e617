"""A planned handover lets one target begin an answer and another go on with it, while the first still speaks.

It is a resumption (`resumption.py`) that nobody was forced to: the second target is given the prompt with the tokens
that the caller has, and from its first new token on the answer is its own. The first one is cancelled then, and not
before, so a second one that fails, is late or says something else costs its own work and nothing of the answer.

What the first says meanwhile is either shown or kept back:

    shown    where both give the same text (`Resumption.grade`: exact) and the second is faster. It repeats what the
             caller has by then, token for token, and is heard from the first one on that the caller has not
    kept     else: tokens of the one can not be followed by tokens of the other that were made without them. What is
             kept is given to no one if the second speaks in time, and to the caller if it does not. It is kept no
             longer than until the next token is due by its budget, or for `PAUSE_S`, which is no stall yet

A second target whose tokens differ from those that the caller has is cancelled. Whatever happens the caller has a
beginning of one text: places are counted here, and no place is given twice or left out.

`HandoverPolicy` is what the request machine asks; `handover_by_chance.py` is the rule.
Source: DiSCo, ACL 2025 (arXiv 2502.11417): a response migrates once what is generated ahead covers the second's prompt.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Candidate, Decision
from gateway.core.request.resumption import LEAST_S, UNKNOWN_S, Resumption

BEGINS: Final = "handover"  # why an answer was begun at a target that is not to end it
PAUSE_S: Final = LEAST_S
LONGEST_PAUSE_S: Final = UNKNOWN_S  # of an answer whose target is too slow for its budget of next tokens


class HandoverPlan(NamedTuple):
    """The second target is asked now."""

    share: float  # of an attempt's work that is computed twice or in vain: what it takes from the purse of hedges
    keeps_until: float | None  # what the first says is kept back until then; None: it is shown
    gives_up_at: float  # the second is not waited for any longer


class HandoverPolicy(Protocol):
    """Where an answer is begun that another target is to end, and when that one is asked. One for all requests."""

    def begins(self, ask: Ask, decision: Decision, now: float) -> Candidate | None:
        """Which of the candidates begins, if it is not the one that was chosen to do it all."""

    def plan(
        self, ask: Ask, speaks: Candidate, resumption: Resumption, decision: Decision, now: float
    ) -> HandoverPlan | float:
        """The handover of an answer to where `decision` says its rest may go, or the instant to look again.

        Nothing is spent yet. Args: ask: the whole answer.
        """

    def may_hand_over(self, share: float) -> bool:
        """Spend so much of a second attempt; False: there is nothing to spend."""


class Successor(NamedTuple):
    """The attempt that is to go on with an answer of which another one still speaks."""

    attempt: int
    keeps_until: float | None
    gives_up_at: float

    @property
    def look_at(self) -> float:
        return self.gives_up_at if self.keeps_until is None else min(self.keeps_until, self.gives_up_at)

"""A first-token race asks a second target beside a silent one, and the first token decides which of them answers.

Once the first token is here the other attempt is cancelled, so a race costs the prompt that was computed in vain and
not a second answer. It may begin at any instant u at which nothing has come yet: early it helps where the second is
slow as well, late it is seldom needed, since the first has mostly answered by then.

    P(u), H(u)   the chance that the first's token, the second's if asked at u, is here by its instant
    S(u)         the chance that there is still silence at u
    a            worth of an answer whose first token was in time, b of one whose was not (`AnswerWorth`)
    w            the chance that the second wins: H · (1 − P / 2), since of two that are in time each may be the sooner

    gain(u) = (1 − P) · H · (a₂ − b₁) + ½ · P · H · (a₂ − a₁) − LAMBDA · cost − harm
    cost    = (1 − w) · prompt₂ + w · (whole₂ − rest₁)⁺             the loser's prompt, and what the answer costs more
    harm    = others in the second's batch · prompt₂ / what their budgets leave an answer · worth of a budget kept
    share   = (1 − w) · prompt₂ / whole₂ + w · prompt₁ / whole₁     of an attempt's work is lost
    u*      = the u with the most S(u) · [gain(u) − share(u) · worth of a token of the purse]

A purse's token pays for a whole second attempt (`token_budget.py`), so a race takes the share of one that it is
expected to lose: the work of lost races is bounded by the purse's share of all requests, as that of hedges is.

A target that speaks sooner and then dawdles is no gain: `a₂ − a₁` is its loss.

A prompt holds up every answer in its target's batch, for nothing if its race is lost. So a target is raced to only
where nobody waits and half of its slots are free, and what its batch loses is taken off the gain.

It can be wrong where both share what delays them, and in `½`: which of two that are in time is the sooner is not worked
out.
Source: docs/design/routing.md, "First-token races". Racing for the first token: DiSCo, ACL 2025 (arXiv 2502.11417).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Candidate
from gateway.core.placement.utility import AnswerWorth

_ROOM: Final = 0.5  # of a target's slots may be taken


class RaceRunner(NamedTuple):
    """One of the two: what its answer is worth, and what it costs."""

    worth: AnswerWorth
    cost: float  # of the whole answer
    prompt_share: float  # of that, until the first token


class RaceGain(NamedTuple):
    """What a race is worth at some instant, and the share of an attempt's work that it loses."""

    gain: float
    share: float


def has_room(second: Candidate) -> bool:
    """Whether a target has slots to spare: none waits there, and at most half are taken, this one included."""
    tokens, slots = second.tokens, second.variant.slots
    assert tokens is not None
    return second.wait_s <= 0.0 and (not slots or tokens.batch <= _ROOM * slots)


def runner(candidate: Candidate, worth: AnswerWorth) -> RaceRunner:
    """Args: candidate: of a generation."""
    tokens = candidate.tokens
    assert tokens is not None
    share = tokens.first_s / candidate.compute_s if candidate.compute_s > 0.0 else 1.0
    return RaceRunner(worth, candidate.cost, min(1.0, share))


def prompt_harm(second: Candidate, ask: Ask, worth: AnswerWorth) -> float:
    """What the others in its batch lose by the prompt, in ordinary answers in time.

    Their own budgets are not known here and are taken to be those of this request.
    """
    tokens, generation = second.tokens, ask.generation
    assert tokens is not None and generation is not None
    each_s = generation.next_s or tokens.step_s
    share = min(1.0, tokens.first_s / max(1e-6, each_s * generation.mean_length))
    return max(0.0, tokens.batch - 1.0) * share * (worth.in_time - worth.late)


def race_gain(first: RaceRunner, left: float, second: RaceRunner, fresh: float, *, dearness: float) -> RaceGain:
    """What asking the second now is worth.

    Args:
        left, fresh: the chances P and H.
        dearness: LAMBDA, what a unit of cost weighs.
    """
    missed = (1.0 - left) * fresh
    wins = missed + 0.5 * left * fresh
    worth = missed * (second.worth.in_time - first.worth.late)
    worth += 0.5 * left * fresh * (second.worth.in_time - first.worth.in_time)
    rest_of_first = first.cost * (1.0 - first.prompt_share)
    cost = (1.0 - wins) * second.cost * second.prompt_share + wins * max(0.0, second.cost - rest_of_first)
    share = (1.0 - wins) * second.prompt_share + wins * first.prompt_share
    return RaceGain(worth - dearness * cost, share)

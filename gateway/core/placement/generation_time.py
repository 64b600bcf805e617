"""The time of a generation: when its first token is here, how long each further one takes, and when it ends.

    first token    T₁ = round trip + wait for a slot + the engine's time for the prompt     as a single answer's time
    each further   τ  = a step of the batch that is there, log-normal
    the end        T₁ + (L − 1) · τ      L: `QUANTILES` lengths that are equally likely (`output_length.py`)

    P(first)  P(T₁ <= first budget)
    P(next)   P(τ <= next budget), given that the first was in time; an answer of one token keeps it
    P(whole)  mean over L of P(T₁ + (L − 1) · τ <= budget), given that both others were kept

So this is one more completion time (`completion.py`), whose distribution is a mixture over lengths. What "given" means
for the last is taken care of coarsely: neither T₁ nor τ is expected beyond a budget that was kept. The rest of it is
learned (`gateway/core/estimate/token_calibration.py`).

A request may be shown nothing before its first token, so that is what a hedge watches: the instant by which it has to
come (`begin_by`) is its own budget's, or what the rest of the answer leaves of the whole budget.

It can be wrong for batches that grow while an answer runs, and for jitter on the way back, which moves tokens together
and hardly changes their average. Source: docs/design/routing.md, "Answers in parts".
"""

from __future__ import annotations

from math import erf, exp, log, sqrt
from typing import Final, NamedTuple

from gateway.core.estimate.known_prefixes import PrefixChain
from gateway.core.estimate.link_estimate import RttDistribution
from gateway.core.estimate.token_calibration import GenerationBudget, TokenChances
from gateway.core.estimate.token_pace import TokenPrediction
from gateway.core.placement.completion import CompletionTime, completion_time

_SQRT_2: Final = sqrt(2.0)
_REACH: Final = 5.0  # sigmas
_LEAST_S: Final = 1e-3  # that an engine takes for a first token: one that is due by now is still to be computed


class GenerationAsk(NamedTuple):
    """What placement needs to know of a generation, beside the work that is expected of it (`Ask.units`)."""

    prompt_units: float  # of work until its first token
    certain_units: float  # of work that it is at least: an answer may end at its first token, unless nothing ends it
    most_units: float  # of work with all tokens that it may have
    lengths: tuple[float, ...]  # of the answer, in tokens; equally likely
    mean_length: float
    max_tokens: int
    first_by: float | None = None  # the instant by which the first token is due
    next_s: float | None = None  # for each further one, on average
    token_units: float = 0.0  # of work, of one token of the prompt
    prefix: PrefixChain = ()  # the prompt's blocks, by which a cache knows them
    prompt_tokens: int = 0

    def budget(self, deadline: float) -> GenerationBudget:
        return GenerationBudget(self.first_by, self.next_s, deadline)


class GenerationTime(NamedTuple):
    """How long a generation takes at one candidate, as a distribution."""

    first: CompletionTime
    step_s: float  # median
    step_sigma: float
    lengths: tuple[float, ...]

    def chances(self, budget: GenerationBudget, now: float) -> TokenChances:
        """The three chances, raw."""
        left_s = budget.whole_by - now
        first_by, next_s = budget.first_by, budget.next_s
        first, step_s, path = 1.0, self.step_s, self.first
        if first_by is not None:
            first = path.by(first_by - now)
            most_s = max(_LEAST_S, first_by - now - path.path.median_s)
            path = path._replace(busy_s=min(path.busy_s, most_s), trust=1.0)
        next_ = 1.0
        if next_s is not None:
            more = sum([1 for length in self.lengths if length > 1.0]) / len(self.lengths)
            next_ = 1.0 - more * (1.0 - log_normal(next_s, step_s, self.step_sigma))
            step_s = min(step_s, next_s)
        return TokenChances(first, next_, self._whole(path, step_s, left_s))

    def _whole(self, first: CompletionTime, step_s: float, left_s: float) -> float:
        skew = exp(self.step_sigma * self.step_sigma)
        mean_s = step_s * sqrt(skew)
        total = 0.0
        for length in self.lengths:  # they rise, and chances fall
            decode_s = max(0.0, length - 1.0) * mean_s
            # variances of T₁'s busy time and of (L − 1) · τ, whose steps err together
            spread_s = sqrt(first.spread_s * first.spread_s + decode_s * decode_s * (skew - 1.0))
            chance = first._replace(busy_s=first.busy_s + decode_s, spread_s=spread_s).by(left_s)
            if chance <= 0.0:
                break
            total += chance
        return total / len(self.lengths)


def generation_time(
    path: RttDistribution, wait_s: float, tokens: TokenPrediction, lengths: tuple[float, ...], *, trust: float
) -> GenerationTime:
    """The distribution of a generation's time. Args: wait_s: the mean wait for a slot."""
    first = completion_time(
        path, wait_s, tokens.wait_variance, tokens.first_s, tokens.first_sigma, trust=trust, skewed=True
    )
    return GenerationTime(first, tokens.step_s, tokens.step_sigma, lengths)


def made_late(ask: GenerationAsk, tokens: TokenPrediction, before_s: float) -> float:
    """How many of the answers under way there this one would make miss their budgets of next tokens, on average.

    It makes every step longer for as long as it is there, and its prompt holds each of the others up once, which is
    spread over as many tokens as an answer has. The budgets of the others are taken to be its own.

    Args:
        before_s: a step without it.
    """
    others = tokens.batch - 1.0
    if ask.next_s is None or others <= 0.0:
        return 0.0
    after_s = tokens.step_s + tokens.first_s / max(1.0, ask.mean_length)
    keep_before = log_normal(ask.next_s, before_s, tokens.step_sigma)
    return others * max(0.0, keep_before - log_normal(ask.next_s, after_s, tokens.step_sigma))


def begin_by(ask: GenerationAsk, tokens: TokenPrediction, deadline: float, now: float) -> float:
    """The instant by which the first token has to be here: by its own budget, or for the rest to be in time.

    Where that is past already only the deadline of the whole is left.
    """
    rest_s = max(0.0, ask.mean_length - 1.0) * tokens.step_s
    latest = max(now, deadline - rest_s)
    return min(latest, ask.first_by) if ask.first_by is not None and ask.first_by > now else latest


def log_normal(at_s: float, median_s: float, sigma: float) -> float:
    """The chance that a log-normal time is at most `at_s`."""
    if at_s <= 0.0:
        return 0.0
    sigmas = log(at_s / median_s) / sigma
    return 1.0 if sigmas >= _REACH else 0.0 if sigmas <= -_REACH else 0.5 + 0.5 * erf(sigmas / _SQRT_2)

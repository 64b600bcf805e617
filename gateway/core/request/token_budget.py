"""The token budget bounds the second attempts of the traffic as a whole.

Each request earns a share of a token and each second attempt costs one, so that extra load stays a fixed share of the
load: a limit per request does not do that, since in a bad minute every request wants its second attempt at once, and
the extra load then makes the minute worse. Tokens saved in good times carry a burst, up to a cap.

Hedges and fallbacks draw on one budget, with one difference: a hedge is insurance and needs a whole token, a fallback
is its request's only chance and may overdraw the budget by as much as it can hold. So hedges stop first, a target that
dies with a few dozen requests under way loses none, and a fleet that fails for good is not asked everything three
times.

A race to a generation's first token loses a prompt and no answer, so it costs that share of a token. A connection that
ends takes all requests with it that were under way on it, most of which waited in the target's queue: a fallback after
it costs the share of the attempt that had been computed, as one does after a target's word that it will be too late.
Charged as wholes, the requests of a few targets behind a switch that restarts thrice spent the budget, and the others
were refused while their targets were back.

Invariants: −cap <= tokens <= cap; over any stretch of n requests what second attempts lose is at most n · share +
2 · cap attempts' work, and there are at most ten times as many.
Source: Finagle's RetryBudget; gRFC A6 (retry throttling); docs/design/routing.md, "Retry budget" (0.04 per request, cap
30).
"""

from __future__ import annotations

from typing import Final

_LEAST_SHARE: Final = 0.1  # an attempt is a decision and a message at the least


class TokenBudget:
    """Mutable: `earn` with each request, then `spend` or `overdraw` for each second attempt; False means no."""

    __slots__ = ("_cap", "_share", "suppressed", "tokens")

    def __init__(self, *, share: float = 0.04, cap: float = 30.0) -> None:
        self.tokens = cap  # full, so that what fails in the first minute after a start is not lost
        self.suppressed = 0  # hedges that there was nothing left for
        self._share = share
        self._cap = cap

    @property
    def spent(self) -> float:
        """The share of the cap that is spent, 0 to 1."""
        return 1.0 - max(0.0, self.tokens) / self._cap if self._cap else 1.0

    def earn(self) -> None:
        self.tokens = min(self._cap, self.tokens + self._share)

    def spend(self, share: float = 1.0) -> bool:
        """For a hedge. Args: share: of a whole second attempt, that it is expected to waste, 0 to 1."""
        spent = self._take(share, down_to=0.0)
        self.suppressed += not spent
        return spent

    def overdraw(self, share: float = 1.0) -> bool:
        """For a fallback. Args: share: of an attempt's work, that the failed one had done, 0 to 1."""
        return self._take(max(_LEAST_SHARE, share), down_to=-self._cap)

    def _take(self, share: float, down_to: float) -> bool:
        if self.tokens - share < down_to:
            return False
        self.tokens -= share
        return True

    def __repr__(self) -> str:
        return f"<TokenBudget {self.tokens:.1f} of {self._cap:g}>"

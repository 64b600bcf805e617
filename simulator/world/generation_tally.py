"""What generations are counted by: first tokens, further ones, goodput and smooth goodput, and the three chances.

    goodput          answers that kept the budgets of their first token and of each further one, on average
    smooth goodput   tokens that came by their own instants: token n is due at first budget + (n − 1) · next budget

Tokens that are held back to smooth an answer, and requests that are given up, gain nothing by the second. A caller that
leaves is judged by what it was shown. A request that was never answered has missed both.

Source: goodput: Zhong et al., "DistServe", OSDI 2024; an instant for each token: arXiv 2410.14257, of whose smooth
goodput this has the instants and not the price of waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gateway.core.estimate.token_calibration import TokenClaim, TokenTimes
from gateway.core.placement.ask import Ask
from simulator.world.arrivals import SimulatedRequest
from simulator.world.histograms import Latencies, ReliabilityTally
from tidegate.outcome import ServeError
from tidegate.types import Resumed


class TokenTally:
    """Mutable: the tokens of one request as its caller saw them."""

    __slots__ = ("first_at", "first_s", "in_time", "last_at", "longest_gap_s", "made")

    def __init__(self) -> None:
        self.made = 0
        self.in_time = 0  # by their own instants
        self.first_at = 0.0
        self.first_s = 0.0  # from the request's arrival
        self.last_at = 0.0
        self.longest_gap_s = 0.0

    def add(self, made: int, now: float, ask: Ask, request: SimulatedRequest) -> None:
        """So many tokens of the answer are here now."""
        if not self.made:
            self.first_at, self.first_s = now, now - request.at
        else:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
        generation = ask.generation
        assert generation is not None
        due = ask.deadline if generation.first_by is None else generation.first_by
        for place in range(self.made, made):
            self.in_time += now <= due + place * (generation.next_s or 0.0)
        self.made, self.last_at = made, now

    def kept(self, ask: Ask) -> bool:
        """Whether the budgets of its tokens were kept; without a token only where there is none for the first."""
        generation = ask.generation
        if generation is None:
            return True
        if not self.made:
            return generation.first_by is None
        if generation.first_by is not None and self.first_at > generation.first_by:
            return False
        each_s = TokenTimes(self.made, self.first_at, self.last_at).each_s
        return generation.next_s is None or each_s is None or each_s <= generation.next_s


class GenerationTally:
    """Mutable: `add` each request at its end, `settle` the claim of each first attempt."""

    def __init__(self) -> None:
        self.requests = 0
        self.kept = 0
        self.tokens = 0
        self.tokens_in_time = 0
        self.prompt_tokens = 0
        self.races = 0  # requests of which two attempts were under way when the first token came
        self.race_tokens = 0  # that the losers had computed by then: of prompts, and of answers
        self.handovers = 0  # answers that another worker took over as planned
        self.handovers_lost = 0  # of which nothing came: it failed, was late, or said something else
        self.handover_tokens = 0  # that were computed twice for them, or in vain
        self.resumed = 0  # times that another worker went on with an answer
        self.whole = 0  # answers that ended by themselves, with all of their tokens
        self.wrong = 0  # answers with a token that was lost, came twice, or was missing at a whole end
        self.broken_off: Counter[str] = Counter()  # answers that had begun and ended with an error, by what it said
        self.resume_gaps = Latencies()  # from the last token of the one to the first of the other
        self.first = Latencies()
        self.each = Latencies()
        self.gaps = Latencies()  # the longest of each answer
        self.chances = {name: ReliabilityTally() for name in ("first", "next", "whole", "all")}

    def lost_race(self, computed_tokens: int) -> None:
        """An attempt was cancelled since another one's first token is here."""
        self.races += 1
        self.race_tokens += computed_tokens

    def handed_over(self, wasted_tokens: int) -> None:
        """An answer was taken over as planned. Args: wasted_tokens: computed twice, or made and not shown."""
        self.handovers += 1
        self.handover_tokens += wasted_tokens

    def lost_handover(self, computed_tokens: int) -> None:
        """A target that was to take an answer over was asked in vain."""
        self.handovers_lost += 1
        self.handover_tokens += computed_tokens

    def hold_to_truth(self, ids: Sequence[int]) -> None:
        """Compare what a caller was shown with what it should be: the places of the answer, from the first one on."""
        self.wrong += any(id != place for place, id in enumerate(ids))

    def ended(self, resumed: Sequence[Resumed], shown: int, wanted: int) -> None:
        """An answer has ended without an error. Args: shown: tokens that its caller has."""
        self.whole += shown == wanted
        self.wrong += shown != wanted
        self.resumed += len(resumed)
        for one in resumed:
            self.resume_gaps.add(one.gap_s)

    def broke_off(self, error: ServeError) -> None:
        """An answer that had begun has ended with an error. Its last words are why it was not gone on with."""
        _, is_declared, why = error.message.rpartition("could not be gone on with: ")
        self.broken_off[why if is_declared else error.code] += 1

    def add(self, tokens: TokenTally, ask: Ask, prompt_tokens: int) -> None:
        self.requests += 1
        self.kept += tokens.kept(ask)
        self.tokens += tokens.made
        self.tokens_in_time += tokens.in_time
        self.prompt_tokens += prompt_tokens
        if tokens.made:
            self.first.add(tokens.first_s)
            self.gaps.add(tokens.longest_gap_s)
        if tokens.made > 1:
            self.each.add((tokens.last_at - tokens.first_at) / (tokens.made - 1))

    def settle(
        self, claim: TokenClaim, now: float, *, first_at: float | None, times: TokenTimes | None, given_up: bool
    ) -> None:
        """Compare what was claimed with what came, each chance where those before it were kept.

        Args:
            times: None where no whole answer came.
        """
        budget, chances, claims = claim.budget, self.chances, claim.claims
        in_time = first_at is not None and (budget.first_by is None or first_at <= budget.first_by)
        goes_on = times is None and first_at is not None  # another worker goes on with the answer
        if (given_up or goes_on) and now < budget.whole_by:  # how it would have ended is not known
            if budget.first_by is not None and (first_at is not None or now >= budget.first_by):
                chances["first"].add(claims.first, in_time)
            return
        kept = in_time or budget.first_by is None
        if budget.first_by is not None:
            chances["first"].add(claims.first, kept)
        if kept and budget.next_s is not None and times is not None:
            kept = times.each_s is None or times.each_s <= budget.next_s
            chances["next"].add(claims.next, kept)
        if kept:
            kept = times is not None and now <= budget.whole_by
            chances["whole"].add(claims.whole, kept)
        chances["all"].add(claim.claimed, kept)

    def __repr__(self) -> str:
        return f"<GenerationTally {self.kept} of {self.requests} kept>"

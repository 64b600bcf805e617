"""The token pace of one generating variant on one target: its first token, its further ones, and who holds its slots.

    first token    wait for a slot, then the engine's time for the prompt, without what its cache is likely to have of
                   it (`known_prefixes.py`)
    further ones   steps, one token of every sequence under way each

Both times come from what the target measured with one sequence (`tidegate/estimate/token_costs.py`), times a batch
effect (`batch_effect.py`) learned from answers: the engine's own times where an answer says them, and else the instants
at which its tokens came.

A generation has a queue of its own: a slot of several, beside the target's single answers. With `n` under way or
waiting and `c` slots nobody waits while n < c. Beyond, the wait is that for n − c + 1 ends, and `c` sequences end at
the rate c / S, S being how long one holds its slot:

    wait = (n − c + 1) · S / c        variance = (n − c + 1) · (S / c)²        M/M/c, for lengths are about exponential

`n` is what this gateway has there, and what the target's last report has beyond all of this gateway's attempts
(`QueueEstimate.others`). How far such waits have been off is learned as everywhere (`wait_error.py`).

It can be wrong where memory for caches runs out before slots do, which only the target knows, where a target's other
models' requests are in its report, and for long contexts, whose steps are longer: that is in the spread.
Invariants: all times are above 0 and finite; waits are not negative. O(1).
Source: Kleinrock, "Queueing Systems" I, 1975, 3.5 (M/M/c, the wait of one that finds n there); prefill and decode as
two phases: Agrawal et al., "Sarathi-Serve", OSDI 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Final, NamedTuple

from gateway.core.estimate.batch_effect import BatchEffect
from gateway.core.estimate.known_prefixes import KnownPrefixes
from gateway.core.estimate.wait_error import WaitError
from tidegate.estimate.token_costs import token_costs

_FORGET_S: Final = 60.0  # without an answer for this long, what was learned is worth 1/e of what it was


class TokenPrediction(NamedTuple):
    """A candidate's times for a generation, in seconds: the engine's medians, and standard deviations of their logs."""

    first_s: float  # of the prompt, once it has a slot
    first_sigma: float
    step_s: float  # of each further token
    step_sigma: float
    wait_variance: float
    batch: float  # sequences that were taken to be under way, this one included
    cached_tokens: float = 0.0  # of the prompt, that its cache is expected to have


class TokenPace:
    """Mutable: `launched` and `ended` for each generation, `record` at its end; predictions for the next one."""

    __slots__ = ("_faded_at", "_held_s", "costs", "first", "prefixes", "step", "under_way", "wait_error")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """Args: points: (work, seconds) of the warm-up."""
        self.costs = token_costs(points)
        self.first = BatchEffect()
        self.step = BatchEffect()
        self.wait_error = WaitError()
        self.prefixes = KnownPrefixes()
        self.under_way = 0  # this gateway's own, waiting or running
        self._held_s = 0.0  # Σ of the seconds that those were expected to take
        self._faded_at: float | None = None

    def first_s(self, prompt_units: float, batch: float) -> float:
        """Median seconds of the engine until the first token, with so many sequences there."""
        return self.costs.prompt_takes_s(prompt_units) * self.first.times(batch)

    def step_s(self, batch: float) -> float:
        """Median seconds of a step with so many sequences there."""
        return self.costs.step_s * self.step.times(batch)

    def wait(self, there: float, slots: int, own_s: float) -> tuple[float, float]:
        """The mean and the variance of the wait for a slot, in seconds.

        Args:
            there: those waiting or running.
            slots: at a time; 0: without a limit that is known.
            own_s: how long this one would hold its slot: the best guess while none is under way.
        """
        ends = there - slots + 1.0
        if not slots or ends <= 0.0:
            return 0.0, 0.0
        held_s = self._held_s / self.under_way if self.under_way else own_s
        share_s = held_s / slots  # S / c
        return ends * share_s, ends * share_s * share_s

    def launched(self, expected_s: float) -> None:
        """A generation was sent there, which should hold its slot for so long."""
        self.under_way += 1
        self._held_s += expected_s

    def ended(self, expected_s: float) -> None:
        """It is over, however it ended."""
        self.under_way -= 1
        self._held_s = self._held_s - expected_s if self.under_way > 0 else 0.0

    def record(self, prompt_units: float, first_s: float, step_s: float | None, batch: float) -> None:
        """Learn from one answer.

        Args:
            first_s: seconds of the engine until its first token.
            step_s: of each further one, on average; None where there was none.
            batch: as it was when it was placed.
        """
        self._faded_at = None
        if first_s > 0.0:
            self.first.record(self.costs.prompt_takes_s(prompt_units), first_s, batch)
        if step_s is not None and step_s > 0.0:
            self.step.record(self.costs.step_s, step_s, batch)

    def relax(self, now: float) -> None:
        """Forget a little for the time since the last call, if nothing was recorded since."""
        if self._faded_at is not None:
            share = 1.0 - exp(-max(0.0, now - self._faded_at) / _FORGET_S)
            self.first.fade(share)
            self.step.fade(share)
        self._faded_at = now

    def __repr__(self) -> str:
        return f"<TokenPace {self.under_way} under way, step {self.costs.step_s * 1e3:.1f} ms {self.step!r}>"

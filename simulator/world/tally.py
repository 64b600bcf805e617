"""Counts of how every request ended; no list grows with the number of requests.

Each request that arrives ends in exactly one of the outcomes of `tidegate/outcome.py`, so

    arrivals = Σ outcomes            (`check` insists)

An answer counts as in time by the caller's own clock at the gateway; a refusal, an expiry and a late answer are all
misses. Requests that arrive while the fleet warms up are counted apart, in `warmup` only.

Percentiles and reliabilities are in `histograms.py`, and what generations add in `generation_tally.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulator.world.generation_tally import GenerationTally
from simulator.world.histograms import Latencies, ReliabilityTally
from tidegate.outcome import Outcome

TIMELINE_BIN_S = 0.25


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How one request ended."""

    kind: str  # its class
    priority: int
    arrived_at: float
    ended_at: float
    outcome: Outcome
    in_time: bool
    served_by: str = ""
    quality: float = 0.0
    attempts: int = 0
    hedged: bool = False
    hedge_won: bool = False
    tenant: str = ""
    units: float = 0.0  # of its work


@dataclass(slots=True)
class TallyGroup:
    """The counts of one class, one priority, or all."""

    arrivals: int = 0
    in_time: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: Latencies = field(default_factory=Latencies)

    @property
    def attainment(self) -> float:
        return self.in_time / self.arrivals if self.arrivals else 1.0

    def add(self, end: RequestEnd) -> None:
        self.arrivals += 1
        self.in_time += end.in_time
        self.outcomes[end.outcome.value] += 1
        if end.served_by:
            self.latencies.add(end.ended_at - end.arrived_at)


class OutcomeTally:
    """Mutable: `begin` with each arrival, `end` once for each."""

    def __init__(self, counts_from: float) -> None:
        self.counts_from = counts_from
        self.all = TallyGroup()
        self.warmup = TallyGroup()
        self.by_class: dict[str, TallyGroup] = {}
        self.by_priority: dict[int, TallyGroup] = {}
        self.by_tenant: dict[str, TallyGroup] = {}
        self.served_by: Counter[str] = Counter()
        self.retries = 0  # by clients that got no answer, warm-up included
        self.attempts = 0  # of those that were answered
        self.launches = 0  # of all
        self.hedged = 0
        self.hedges_won = 0
        self.cut = 0  # that were answered in halves
        self.quality = 0.0  # sum over answers in time
        self.useful_s = {"edge": 0.0, "pool": 0.0, "site": 0.0}  # compute behind answers that were given, by tier
        self.reliability = ReliabilityTally()
        self.generations = GenerationTally()
        self.within_margin = [0, 0]  # of attempts whose end is known: in their 95 % prediction, and all
        self.timeline: dict[int, list[int]] = {}  # bin → [arrivals, in time]
        self._begun = 0
        self._ended = 0

    def begin(self) -> None:
        self._begun += 1

    def end(self, end: RequestEnd) -> None:
        self._ended += 1
        bin_ = self.timeline.setdefault(int(end.arrived_at / TIMELINE_BIN_S), [0, 0])
        bin_[0] += 1
        bin_[1] += end.in_time
        if end.arrived_at < self.counts_from:
            self.warmup.add(end)
            return
        self.all.add(end)
        self.by_class.setdefault(end.kind, TallyGroup()).add(end)
        self.by_priority.setdefault(end.priority, TallyGroup()).add(end)
        if end.tenant:
            self.by_tenant.setdefault(end.tenant, TallyGroup()).add(end)
        self.attempts += end.attempts
        self.hedged += end.hedged
        self.hedges_won += end.hedge_won
        if end.served_by:
            self.served_by[end.served_by] += 1
        if end.in_time:
            self.quality += end.quality

    @property
    def amplification(self) -> float:
        """Attempts at targets for each request that a client meant: retries, hedges and fallbacks are all in it."""
        return self.launches / self.all.arrivals if self.all.arrivals else 1.0

    def check(self) -> None:
        """Raises AssertionError when a request was lost, or ended twice."""
        outcomes = self.all.outcomes.total() + self.warmup.outcomes.total()
        assert self._begun == self._ended == outcomes, (
            f"{self._begun} requests arrived, {self._ended} ended, in {outcomes} outcomes"
        )

    def __repr__(self) -> str:
        return f"<OutcomeTally {self.all.in_time} of {self.all.arrivals} in time>"

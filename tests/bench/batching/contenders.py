"""Those who are compared, all asked in the same way: a run at a rate, and callers one after another.

A run's verdict is for a budget: held, when 99 of 100 of all requests were answered within it, counted from their
scheduled instants. Runs end early once that is out of reach. Whoever is told budgets (ours) has a run for each; of the
others one run judges all budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.bench.batching.search import highest
from tests.bench.batching.servers import Where
from tests.bench.batching.targets import PATIENCE_S
from tests.bench.harness import Child

HELD = 0.99
BUDGETS_S = (0.1, 0.25)


@dataclass(frozen=True, slots=True)
class Run:
    """One open-loop run. Requests that were not sent any more, after it was given up, are due but have no latency."""

    due: int
    latencies_s: tuple[float, ...]
    given_up: bool = False
    late_p99_s: float = 0.0

    def within(self, budget_s: float) -> float:
        """The share of all that were due."""
        return sum(one <= budget_s for one in self.latencies_s) / max(1, self.due)

    def holds(self, budget_s: float) -> bool:
        return not self.given_up and self.within(budget_s) >= HELD


class Contender(Protocol):
    name: str
    told_budgets: bool

    async def run(self, rate: float, seconds: float, seed: int, budget_s: float) -> Run: ...


@dataclass
class Server:
    """A server, asked by the generator."""

    name: str
    generator: Child
    where: Where
    told_budgets: bool = False

    async def run(self, rate: float, seconds: float, seed: int, budget_s: float) -> Run:
        due = rate * seconds
        words = {"rate": rate, "seconds": seconds, "seed": seed, "give_up_after": (1.0 - HELD) * due}
        told_s = budget_s if self.told_budgets else PATIENCE_S
        found = await self.ask("open", budget_s=told_s, counted_s=budget_s, **words)
        return Run(found["due"], tuple(found["latencies_s"]), found["given_up"], found["late_p99_s"])

    async def closed(self, callers: int, seconds: float, seed: int) -> dict[str, Any]:
        return await self.ask("closed", callers=callers, seconds=seconds, seed=seed)

    async def ask(self, op: str, **words: Any) -> dict[str, Any]:
        await self.generator.command(op=op, target=self.where.words(), **words)
        return await self.generator.line()


@dataclass
class InProcess:
    """A rule without a server."""

    name: str
    alone: Child
    policy: str
    told_budgets: bool = False

    async def run(self, rate: float, seconds: float, seed: int, budget_s: float) -> Run:
        await self.alone.command(op="open", policy=self.policy, rate=rate, seconds=seconds, seed=seed)
        latencies_s = tuple((await self.alone.line())["latencies_s"])
        return Run(len(latencies_s), latencies_s)


@dataclass
class Rates:
    """The highest rates held, one search for each contender, budget and repeat; it starts where the last ended."""

    seconds: float
    started_at: dict[tuple[str, float], float] = field(default_factory=dict)
    found: dict[tuple[str, float], list[float]] = field(default_factory=dict)
    late_p99_s: list[float] = field(default_factory=list)

    async def search(self, contender: Contender, seed: int, first_guess: float) -> None:
        """For each budget, with the schedule of one seed."""
        runs: dict[tuple[float, float], Run] = {}
        for budget_s in BUDGETS_S:
            key = contender.name, budget_s
            start = self.started_at.get(key, first_guess)
            rate = await highest(lambda rate, b=budget_s: self._holds(contender, rate, b, seed, runs), start)  # type: ignore[misc]
            self.found.setdefault(key, []).append(rate)
            self.started_at[key] = first_guess = max(rate, 8.0)

    async def _holds(
        self, contender: Contender, rate: float, budget_s: float, seed: int, runs: dict[tuple[float, float], Run]
    ) -> bool:
        told_s = budget_s if contender.told_budgets else max(BUDGETS_S)
        if (rate, told_s) not in runs:
            runs[rate, told_s] = run = await contender.run(rate, self.seconds, seed, told_s)
            self.late_p99_s.append(run.late_p99_s)
        return runs[rate, told_s].holds(budget_s)

    def of(self, name: str, budget_s: float) -> list[float]:
        return self.found.get((name, budget_s), [])

    def best(self, names: Sequence[str], budget_s: float, repeat: int) -> float:
        """The highest of these in one repeat, or in the last one that each was in; 0 without any."""
        held = [self.of(name, budget_s) for name in names]
        return max((rates[min(repeat, len(rates) - 1)] for rates in held if rates), default=0.0)

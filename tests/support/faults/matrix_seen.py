"""What was seen of one row of the fault matrix, and the questions that its acceptance numbers ask.

Three accounts of the same requests: the callers' (`answers`: status, latency, who served), the gateway's counters
(`counted`, by outcome) and its own memory of each decision (`flights`: which attempts went where, and when). Times are
seconds from the first instant of the load; `phases` are where before begins, the fault, its end, and where after does.

Callers see HTTP. 200 in time counts as attained; every other end is a miss. A row that restarts the gateway has fewer
flights, and counters of the new one only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from statistics import median
from typing import Any, Final, NamedTuple

from gateway.core.estimate.link_estimate import SLACK_S
from tests.bench.open_loop import LEFT, Answer

# What a caller may see when nothing can be done: shed, nobody there, unreachable, late.
DOCUMENTED: Final = frozenset({200, 429, 502, 503, 504})
_UNDER_WAY_S: Final = 1.0  # before a fault: what was sent then may be hit by it
_EVEN: Final = 0.5
_SMALL: Final = 128  # units that every target takes
_LINES_PER_CHANGE: Final = 3


class Look(NamedTuple):
    """The gateway's state at an instant: by target, its state and the reason, and the round trip it expects."""

    at: float
    states: dict[str, tuple[str, str]]
    rtt_s: dict[str, float]


class Step(NamedTuple):
    """Something that happened to an attempt: launched, accepted, answered, failed, cancelled."""

    at: float
    what: str
    target: str
    attempt: int
    reason: str = ""
    promised_s: float = 0.0  # until the answer, by an acceptance


@dataclass(frozen=True, slots=True)
class Flight:
    """What the gateway did about one request."""

    number: int
    at: float
    units: float
    outcome: str
    elapsed_s: float
    steps: tuple[Step, ...]
    trust: Mapping[str, float]  # of each candidate, when it was placed
    expected_s: Mapping[str, float]  # the compute that was predicted of each
    served_by: str
    compute_s: float  # of the answer that was given

    @classmethod
    def of(cls, told: Mapping[str, Any], at: float) -> Flight:
        """From an entry of /debug/decisions, and the instant at which the request was sent."""
        events = [event for event in told["events"] if event["what"] != "look"]
        targets = {event["attempt"]: event["target"] for event in events if event["what"] == "launched"}
        steps = [
            Step(
                at + event["at_ms"] / 1e3, event["what"], targets.get(event["attempt"], ""), event["attempt"],
                event.get("reason", ""), event.get("promised_in_ms", 0.0) / 1e3,
            )
            for event in events
        ]  # fmt: skip
        candidates = told.get("candidates", [])
        return cls(
            int(told["id"]), at, told.get("units", 0.0), told["outcome"], told["elapsed_ms"] / 1e3, tuple(steps),
            {one["target"]: one["trust"] for one in candidates},
            {one["target"]: one["compute_ms"] / 1e3 for one in candidates},
            told["end"].get("served_by", ""),
            told["stages_ms"].get("compute", 0.0) / 1e3,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """The requests that were sent within it."""

    answers: list[Answer]

    def of(self, *kinds: str) -> Phase:
        return Phase([one for one in self.answers if one.kind in kinds])

    def where(self, wanted: Callable[[Answer], bool]) -> Phase:
        return Phase([one for one in self.answers if wanted(one)])

    def attainment(self) -> float:
        """The share of those who waited that was answered in time, by the callers' clocks."""
        waited = [one for one in self.answers if one.status != LEFT]
        return sum(_in_time(one) for one in waited) / max(1, len(waited))

    def statuses(self) -> Counter[int]:
        return Counter(one.status for one in self.answers)

    def served(self) -> Counter[str]:
        return Counter(one.served_by for one in self.answers if one.status == 200)

    def hedged_share(self) -> float:
        return sum(one.hedged for one in self.answers) / max(1, len(self.answers))

    def __len__(self) -> int:
        return len(self.answers)


@dataclass(frozen=True, slots=True)
class Seen:
    """One row's run."""

    row: str
    answers: list[Answer]
    phases: tuple[float, float, float, float]
    flights: list[Flight]
    looks: list[Look]
    counted: Counter[str]
    logs: dict[str, str]
    changes: int
    sent_late_p99_s: float
    baseline: list[Answer]

    # phases

    @property
    def before(self) -> Phase:
        return self.between(self.phases[0], self.phases[1] - _UNDER_WAY_S)

    @property
    def during(self) -> Phase:
        """Requests that were sent while it was broken, and those that were under way when it broke."""
        from_s, to_s = self.phases[1], self.phases[2]
        return Phase([one for one in self.answers if one.at < to_s and one.at + max(one.latency_s, 0.0) >= from_s])

    @property
    def after(self) -> Phase:
        return self.between(self.phases[3], float("inf"))

    @property
    def usual(self) -> Phase:
        """Before this fault and before all earlier ones of this fleet: one row alone has too few to tell a point."""
        return Phase([*self.baseline, *(one for one in self.before.answers if one not in self.baseline)])

    def between(self, from_s: float, to_s: float) -> Phase:
        return Phase([one for one in self.answers if from_s <= one.at < to_s])

    @property
    def broken_at(self) -> float:
        return self.phases[1]

    @property
    def healed_at(self) -> float:
        return self.phases[2]

    def loss(self, *kinds: str) -> float:
        """How much lower attainment is during the fault than usual, of these classes or of all; in shares."""
        usual, during = (phase.of(*kinds) if kinds else phase for phase in (self.usual, self.during))
        return usual.attainment() - during.attainment()

    def in_time_of_feasible(self, from_s: float, to_s: float, most_units: float) -> float:
        """Of the requests of that time that the edges could have done, how many were in time; above 1 with luck.

        What the edges can do, without knowing how long nobody helps them: the shortest first, until what those take is
        as long as the time is. Each takes as long as all edges that are fast enough for it need together, by what the
        gateway expected of them; one that it refused unplaced, as long as the one nearest in size. A fleet of eight at
        0.6 of what it does with its pool has half as much again to do as it can, without it.
        """
        sent = self.between(from_s, to_s).where(lambda one: one.units <= most_units)
        took_s = sorted(self._together_s(one) for one in sent.answers)
        feasible = sum(so_far <= to_s - from_s for so_far in accumulate(took_s))
        in_time = sum(_in_time(one) for one in sent.answers)
        return in_time / feasible if feasible else 1.0

    def _together_s(self, one: Answer) -> float:
        """How long all edges that make it in time need for this request together; infinite where there are none."""
        flights = [flight for flight in self.flights if flight.expected_s]
        if not flights:
            return inf
        like_it = min(flights, key=lambda flight: (abs(flight.units - one.units), abs(flight.at - one.at)))
        edges = [s for target, s in like_it.expected_s.items() if target.startswith("edge/") and s <= one.budget_s]
        return 1.0 / sum(1.0 / s for s in edges) if edges else inf

    # ends

    @property
    def overrun_s(self) -> list[float]:
        """By how much each request ended after its deadline, by its caller's clock; 0 or below is in time."""
        return [one.latency_s - one.budget_s for one in self.answers]

    def ended_within(self, slack_s: float) -> float:
        """The share of requests that ended by their deadline and so much."""
        return sum(late_s <= slack_s for late_s in self.overrun_s) / max(1, len(self.answers))

    @property
    def unaccounted(self) -> int:
        """Arrivals less terminal outcomes, by the gateway's counters."""
        return sum(one.tries for one in self.answers) - sum(self.counted.values())

    @property
    def undocumented(self) -> Counter[int]:
        """Ends that no caller should see, by status; 0 is silence."""
        return Counter(one.status for one in self.answers if one.status not in DOCUMENTED | {LEFT})

    # what the gateway did

    def launches(self, target: str, from_s: float = 0.0, to_s: float = float("inf")) -> list[Step]:
        """Attempts that were sent to this target between two instants."""
        return [one for one in self.steps("launched") if one.target == target and from_s <= one.at < to_s]

    def launch_share(self, target: str, from_s: float, to_s: float = float("inf")) -> float:
        """Of all attempts that were sent then, the share that went to this target."""
        total = sum(from_s <= one.at < to_s for one in self.steps("launched"))
        return len(self.launches(target, from_s, to_s)) / max(1, total)

    def steps(self, *whats: str) -> Iterator[Step]:
        return (step for flight in self.flights for step in flight.steps if not whats or step.what in whats)

    def heard(self, target: str) -> list[float]:
        """When something came from it: an ack or an answer."""
        return sorted(one.at for one in self.steps("accepted", "answered") if one.target == target)

    def first_unready(self, target: str) -> float | None:
        """How long after the fault's begin the gateway's state first said that the target is not ready."""
        at = next(
            (
                look.at
                for look in self.looks
                if look.at >= self.broken_at and look.states.get(target, ("gone", ""))[0] != "ready"
            ),
            None,
        )
        return None if at is None else at - self.broken_at

    def patience_s(self, target: str) -> float:
        """4 · RTT + 20 ms, by the round trip that the gateway expected before the fault."""
        rtts = [look.rtt_s[target] for look in self.looks if look.at < self.broken_at and target in look.rtt_s]
        return 4.0 * median(rtts) + 0.020 if rtts else 0.0

    def noticed_after(self, target: str) -> float | None:
        """From the first attempt that the fault swallowed until the gateway gave the target less than an even chance to
        answer at all, or did not consider it any more.

        Placements show what it believes, and come when requests come: 60 ms may lie between two. So from the first that
        doubts it is reckoned back along the law by which silence is judged (`LinkEstimate.answers_after`), but not to
        before the last that still trusted.
        """
        first = min([one.at for one in self.launches(target, self.broken_at)], default=self.broken_at)
        trusted_at = first
        for flight in sorted(self.flights, key=lambda one: one.at):
            if first < flight.at < self.healed_at and flight.trust and flight.units <= _SMALL:
                trust = flight.trust.get(target, 0.0)
                if trust < _EVEN:
                    return max(trusted_at - first, doubted_after(flight.at - first, trust))
                trusted_at = flight.at
        return None

    def served_again_after(self, target: str) -> float | None:
        """How long after the fault's end the target gave its next answer to a request sent since."""
        at = [
            step.at
            for flight in self.flights
            if flight.at >= self.healed_at
            for step in flight.steps
            if step.what == "answered" and step.target == target
        ]
        return min(at) - self.healed_at if at else None

    # logs

    def lines(self) -> list[str]:
        return [line for log in self.logs.values() for line in log.splitlines() if line.strip()]

    @property
    def repeated_lines(self) -> list[tuple[str, int]]:
        """Lines that say the same about the same target more often than it changed: what an operator learns to skip."""
        counts = Counter(
            f"{name}: {_gist(line)}" for name, log in self.logs.items() for line in log.splitlines() if line.strip()
        )
        return [(gist, count) for gist, count in counts.most_common() if count > _LINES_PER_CHANGE * self.changes]

    def __repr__(self) -> str:
        attained = "/".join(f"{100 * one.attainment():.1f}" for one in (self.before, self.during, self.after))
        return f"<Seen {self.row}: {len(self.answers)} requests, {attained} % in time>"


def doubted_after(silence_s: float, trust: float) -> float:
    """After how much of this silence, at whose end so much trust was left, only an even chance was.

    Trust is c / (c + BROKEN), where c falls with the fourth power of the silence beyond SLACK_S. Without any trust
    nothing can be reckoned back: it is the silence itself.
    """
    if trust <= 0.0:
        return silence_s
    left = trust / (1.0 - trust)  # of BROKEN
    return min(silence_s, SLACK_S + (silence_s - SLACK_S) * left**0.25)


def outcomes_of(metrics: str) -> Counter[str]:
    """The gateway's count of requests by outcome, from its Prometheus page."""
    counted: Counter[str] = Counter()
    for labels, value in re.findall(r"^tidegate_requests_total\{([^}]*)\} (\S+)$", metrics, re.MULTILINE):
        found = re.search(r'outcome="([^"]*)"', labels)
        assert found is not None
        counted[found[1]] += int(float(value))
    return counted


def _in_time(one: Answer) -> bool:
    return one.status == 200 and one.latency_s <= one.budget_s


def _gist(line: str) -> str:
    """An event and the target that it is about, without instants and numbers."""
    event = re.search(r'event=("[^"]*"|\S+)', line)
    target = re.search(r'(?:target|device|model)=("[^"]*"|\S+)', line)
    words = event[1] if event is not None else re.sub(r"\d+", "#", line)[:120]
    return f"{words} {target[1] if target is not None else ''}".strip()

"""The scaling signal against the thresholds that everybody uses: late requests and replica-hours, side by side.

    python -m tests.bench.scaling [--quick] [--repeats SEEDS]

The world is the simulator's (real gateway, placement, link frames and batchers on virtual time), with a pool of which
replicas come and go while it runs: one that is asked for serves `START_S` later, one that is let go takes nothing new,
finishes what it has, and is paid for until then. Every 15 s a scaler is asked, as Kubernetes does:

    signal    `scaling`, read as an external metric of AverageValue 1; it holds back going down by itself
    cpu-T     HPA on CPU: ⌈replicas · busy / T⌉, those that are starting counted as idle when it would go up
    queue-T   KEDA on the queue's length: ⌈waiting / T⌉
    all three  tolerance 0.1, at most double or four more in 15 s, down to the largest wish of the last 300 s

Arrivals: a cycle (a sine of 10 minutes), bursts of 20 s that are 2.5 times the rest, and long-tailed gaps
(Pareto, alpha 1.5). Seeds are interleaved: all scalers see the same requests. A ratio of late requests says little
without the replica-hours beside it, so the aim is on both: at no more replica-hours than a threshold (within 5 %), no
more late requests than it. What a threshold saves by being late is in the table.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, pi, sin
from statistics import median
from typing import Final, Protocol

import msgspec

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.scaling import ReplicaScaler, ScalingSpec
from simulator.scenarios.scenario import ArrivalsSpec, PoolSpec, RateStep, Scenario
from simulator.scenarios.scenario_file import LoadedScenario, load
from simulator.simulation import World
from simulator.workers.worker import SimulatedWorker
from simulator.world.conditions import SETTLING_S
from tests.bench.harness import Goal, Report, Spread, parser, table

START_S: Final = 30.0
SYNC_S: Final = 15.0
DOWN_S: Final = 300.0
MOST: Final = 24
_FIRST: Final = 4
_TOLERANCE: Final = 0.1
_SLOWER: Final = 6.0  # than the scenario's pool, and budgets as many times as long: fewer requests for as many replicas
_RATE: Final = 60.0


@dataclass(frozen=True)
class Seen:
    """What a scaler may look at."""

    now: float
    ready: int
    starting: int
    busy: float  # sum of the ready ones' shares of time that they computed since the last look
    waiting: int
    fleet: Fleet


class Scaler(Protocol):
    def wish(self, seen: Seen) -> int:
        """How many replicas there should be."""


class BySignal:
    def wish(self, seen: Seen) -> int:
        needed = seen.fleet.replicas_needed(seen.now)
        assert needed is not None
        return _proposed(float(needed.replicas), 1.0, seen)


class ByCpu:
    """HPA's rule; `target` is the share of its time that a replica should compute."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._down = _Down()

    def wish(self, seen: Seen) -> int:
        ratio = seen.busy / (self._target * seen.ready)
        there = seen.ready
        if ratio > 1.0 and seen.starting:
            there = seen.ready + seen.starting
            ratio = seen.busy / (self._target * there)
            if ratio <= 1.0 + _TOLERANCE:
                return self._down.held(there, seen.now)
        if abs(ratio - 1.0) <= _TOLERANCE:
            return self._down.held(seen.ready + seen.starting, seen.now)
        return self._down.held(ceil(ratio * there - 1e-9), seen.now)


class ByQueue:
    """KEDA's rule; `target` is how many may wait for each replica."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._down = _Down()

    def wish(self, seen: Seen) -> int:
        return self._down.held(_proposed(float(seen.waiting), self._target, seen), seen.now)


def _proposed(value: float, target: float, seen: Seen) -> int:
    """HPA's rule for an external metric of type AverageValue."""
    there = seen.ready + seen.starting
    if abs(value / (target * there) - 1.0) <= _TOLERANCE:
        return there
    return ceil(value / target - 1e-9)


class _Down:
    """HPA's stabilisation window: down to the largest wish of the last `DOWN_S`."""

    def __init__(self) -> None:
        self._wishes: deque[tuple[float, int]] = deque()

    def held(self, wish: int, now: float) -> int:
        self._wishes.append((now, wish))
        while self._wishes[0][0] < now - DOWN_S:
            self._wishes.popleft()
        return max(number for _, number in self._wishes)


class Elastic(World):
    """A world whose pool has as many replicas as a scaler wishes. Mutable: `run` once."""

    def __init__(self, loaded: LoadedScenario, seed: int, scaler: Scaler) -> None:
        self._scaler = scaler
        self._number = 0
        self._replicas: list[SimulatedWorker] = []  # that serve
        self._leaving: list[SimulatedWorker] = []
        self._starting: list[float] = []  # when each will serve
        self._computed_s: dict[str, float] = {}
        self.replica_s = 0.0
        self.most = 0
        super().__init__(loaded, "tidegate", seed)
        for _ in range(_FIRST - 1):
            self._grow()
        self._until = SETTLING_S + loaded.scenario.duration_s
        self.events.schedule(SETTLING_S, self._sync)
        self.events.schedule(SETTLING_S, self._paid)

    def _add_pool(self, pool: PoolSpec) -> None:
        for gateway in self.gateways:
            if gateway.fleet.scaling is None:
                gateway.fleet.scaling = ReplicaScaler(
                    ScalingSpec(start_s=START_S + SYNC_S, scale_down_s=DOWN_S, max_replicas=MOST)
                )
        self._number += 1
        name = f"gpu-{self._number}"
        super()._add_pool(msgspec.structs.replace(pool, name=name))
        self._replicas.append(self.workers[f"pool/{name}"])

    def _grow(self) -> None:
        self._add_pool(self._scenario.pools[0])

    def _ready(self, at: float) -> None:
        if at in self._starting:  # else it was let go before it served
            self._starting.remove(at)
            self._grow()

    def _sync(self) -> None:
        now = self.events.now
        if now >= self._until:
            return
        there = len(self._replicas) + len(self._starting)
        wish = min(MOST, max(1, self._scaler.wish(self._seen(now))), max(2 * there, there + 4))
        for number in range(wish - there):
            at = now + START_S + 1e-3 * number
            self._starting.append(at)
            self.events.schedule(at, self._ready, at)
        for _ in range(there - wish):
            self._shrink(now)
        self.events.schedule(now + SYNC_S, self._sync)

    def _shrink(self, now: float) -> None:
        if self._starting:
            self._starting.pop()
            return
        worker = self._replicas.pop()
        self._leaving.append(worker)
        for gateway in self.gateways:
            gateway.fleet.heard(worker.id, load=None, doubt="", accepting=False, now=now)

    def _seen(self, now: float) -> Seen:
        busy = 0.0
        for worker in self._replicas:
            before = self._computed_s.get(worker.id, worker.compute_s)
            busy += min(1.0, (worker.compute_s - before) / SYNC_S)
            self._computed_s[worker.id] = worker.compute_s
        waiting = sum(worker.queued for worker in self._replicas)
        return Seen(now, len(self._replicas), len(self._starting), busy, waiting, self.gateways[0].fleet)

    def _paid(self) -> None:
        """Every second: a replica costs from when it is asked for until it has finished its last."""
        now = self.events.now
        if now >= self._until:
            return
        self._leaving = [worker for worker in self._leaving if worker.queued or worker.in_flight]
        count = len(self._replicas) + len(self._starting) + len(self._leaving)
        self.most = max(self.most, count)
        if now >= self.tally.counts_from:
            self.replica_s += count
        self.events.schedule(now + 1.0, self._paid)


SCALERS: Final[dict[str, Callable[[], Scaler]]] = {
    "signal": BySignal,
    "cpu-50": lambda: ByCpu(0.5),
    "cpu-70": lambda: ByCpu(0.7),
    "queue-2": lambda: ByQueue(2.0),
    "queue-8": lambda: ByQueue(8.0),
}


def arrivals(kind: str, seconds: float) -> ArrivalsSpec:
    if kind == "bursty":
        return ArrivalsSpec(rate=_RATE, process="bursty", burst_times=2.5, burst_every_s=100.0, burst_for_s=20.0)
    if kind == "long-tailed":
        return ArrivalsSpec(rate=_RATE, process="pareto", alpha=1.5)
    return ArrivalsSpec(rate=_RATE, steps=tuple(_sine(seconds)))


def _sine(seconds: float) -> Iterator[RateStep]:
    for at in range(0, int(seconds), 10):
        yield RateStep(at_s=float(at), for_s=10.0, times=1.0 + 0.7 * sin(2.0 * pi * at / 600.0))


def scenario(kind: str, seconds: float) -> LoadedScenario:
    loaded = load("pool_mix")
    plain: Scenario = loaded.scenario
    changed = msgspec.structs.replace(
        plain,
        duration_s=seconds,
        warmup_s=min(120.0, seconds / 4.0),  # nobody has learned anything yet, and all begin with as many replicas
        arrivals=arrivals(kind, seconds),
        pools=(msgspec.structs.replace(plain.pools[0], slow=_SLOWER),),
        classes=tuple(msgspec.structs.replace(one, budget_ms=_SLOWER * one.budget_ms) for one in plain.classes),
    )
    return loaded.replaced(changed)


@dataclass(frozen=True)
class Found:
    late: float  # share of requests without an answer in time
    replica_hours: float  # an hour
    most: int


def run(kind: str, name: str, seconds: float, seed: int) -> Found:
    world = Elastic(scenario(kind, seconds), seed, SCALERS[name]())
    ended = world.run()
    counted_s = ended.counted_s
    return Found(1.0 - ended.tally.all.attainment, world.replica_s / counted_s, world.most)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--only", default="", help="only arrivals of this kind")
    chosen = options.parse_args()
    seconds = chosen.seconds or (240.0 if chosen.quick else 1800.0)
    seeds = chosen.repeats or (1 if chosen.quick else 3)
    kinds = [kind for kind in ("cycle", "bursty", "long-tailed") if chosen.only in kind]
    scalers = [name for name in SCALERS if not chosen.quick or name in ("signal", "cpu-70", "queue-8")]
    found: dict[tuple[str, str], list[Found]] = {}
    for seed in range(1, seeds + 1):
        for kind in kinds:
            for name in scalers:
                one = run(kind, name, seconds, seed)
                found.setdefault((kind, name), []).append(one)
                told = f"{100.0 * one.late:.2f} % late, {one.replica_hours:.2f} replicas"
                print(f"seed {seed} {kind} {name}: {told}", file=sys.stderr, flush=True)
    late = {key: Spread.of(100.0 * one.late for one in runs) for key, runs in found.items()}
    hours = {key: Spread.of(one.replica_hours for one in runs) for key, runs in found.items()}
    table(
        ["arrivals", "scaler", "late %", "replicas on average", "at most"],
        [
            [kind, name, f"{late[kind, name]:.2f}", f"{hours[kind, name]:.2f}", str(max(one.most for one in runs))]
            for (kind, name), runs in found.items()
        ],
    )
    figures = {
        "late_percent": {f"{kind}.{name}": spread for (kind, name), spread in late.items()},
        "replica_hours_an_hour": {f"{kind}.{name}": spread for (kind, name), spread in hours.items()},
    }
    report = Report("scaling", {"seconds": seconds, "seeds": seeds, "rate": _RATE, "start_s": START_S}, figures)
    for kind in kinds:
        report.goal(Goal(f"scaling_{kind}_late_percent", late[kind, "signal"].median, 1.0, "<="))
        rivals = [name for name in scalers if name != "signal"]
        worse = [name for name in rivals if _beats(found[kind, name], found[kind, "signal"])]
        report.goal(Goal(f"scaling_{kind}_thresholds_that_are_better_in_both", float(len(worse)), 0.0, "<="))
    report.write()


def _beats(rival: list[Found], ours: list[Found]) -> bool:
    """Whether the rival has fewer late requests for no more replica-hours, in the middle of the seeds."""
    pairs = list(zip(rival, ours, strict=True))
    late = median(one.late - our.late for one, our in pairs)
    hours = median(one.replica_hours / our.replica_hours for one, our in pairs)
    return late < 0.0 and hours <= 1.0


if __name__ == "__main__":
    main()

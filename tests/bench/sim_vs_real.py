"""Does the simulator tell the truth? One fleet run both ways: as real processes on loopback, and simulated.

    real        Mosquitto · edge agents · a pool · a gateway ◀──HTTP── `open_loop` in a process of its own
    simulated   `simulator/world`, with what the real side measured put in the place of what the scenario assumes

Both get the same requests at the same instants (the arrivals of one seed), and each run has a gateway that has learned
nothing yet. What the simulated side is given, all of it read from the real one and nothing fitted to the result:

    cost tables      from the targets' offers, as they measured them at warm-up
    drift, noise     of calls against those tables: from the `compute` of answers; of a pool that batches, from a few
                     lone calls. A table holds the fastest of a few runs, so calls take some percent longer, and more
                     where cores are shared; both gateways believe the table at first and learn the rest
    links            from the gateway's own estimate of each round trip and its jitter, averaged over the run's answers

In time is what the gateway's clock says, which is the simulator's word for it; the callers' own view is shown beside.
Two fleets: `paced` (scenario `paced_fleet`: six edges of mixed speed and a pool whose models only take their time, so
that two cores do not decide) and its `twin` with real models: int8 MiniLM on two edges, fp32 on a pool, real text.

It can be wrong about the twin's two edges, which are alike: at low load a millisecond decides between them, and on
shared cores each is faster in turn, while a simulated one is off by a constant. Their sum and the pool's share agree.

    python -m tests.bench.sim_vs_real [--quick] [--repeats 3] [--seconds 30] [--fleet paced|twin|both]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from simulator.replay.measured import always_slow, drift_of, steady_link
from simulator.scenarios.scenario import EdgeGroup, PoolSpec, Scenario
from simulator.scenarios.scenario_file import LoadedScenario, load
from simulator.simulation import simulate
from tests.bench.harness import Child, Goal, Report, Spread, parser, table
from tests.bench.open_loop import Answer
from tests.bench.sim_vs_real_fleets import FLEETS, Fleet
from tests.support.faults.fleet_stack import FleetStack
from tidegate import clock
from tidegate.engines.paced import PacedEngine
from tidegate.estimate.cost_table import CostTable

POLICIES: Final = ("cheapest", "value")
LOADS: Final = (0.3, 0.6, 0.9)
SHARE_AIM: Final = 0.05
_ALONE: Final = 24  # lone calls to the pool, for its drift
_RUN_IN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    repeats: int
    seconds: float
    loads: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What one run came to, real or simulated."""

    attainment: float
    shares: dict[str, float]
    arrivals: int
    p50_s: float
    p99_s: float
    callers: float | None = None  # attainment by the callers' own clocks
    late_p99_s: float = 0.0  # how late the generator was


@dataclass(slots=True)
class Pair:
    """One point, both ways, over the repeats."""

    policy: str
    load: float
    real: list[Told] = field(default_factory=list)
    simulated: list[Told] = field(default_factory=list)

    @property
    def attainment_gap(self) -> Spread:
        return Spread.of(s.attainment - r.attainment for r, s in zip(self.real, self.simulated, strict=True))

    def share_gaps(self) -> dict[str, Spread]:
        targets = sorted({name for told in (*self.real, *self.simulated) for name in told.shares})
        pairs = list(zip(self.real, self.simulated, strict=True))
        return {
            name: Spread.of(s.shares.get(name, 0.0) - r.shares.get(name, 0.0) for r, s in pairs) for name in targets
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """What one real run measured, as the simulated one is given it."""

    tables_ms: dict[str, tuple[tuple[float, float], ...]]
    drift: dict[str, float]
    sigma: dict[str, float]
    rtt_s: dict[str, float]
    jitter_s: dict[str, float]


def measured_scenario(base: Scenario, found: Measured) -> Scenario:
    """The scenario with what was measured in the place of what it assumes."""
    model = base.classes[0].model
    edges = [id for id in found.tables_ms if id.startswith("edge/")]
    (pool,) = (id for id in found.tables_ms if id.startswith("pool/"))
    spec = replace(base.models[model], pool_ms=found.tables_ms[pool])
    faults = [always_slow(_simulated(id), drift) for id, drift in found.drift.items()]
    return replace(
        base,
        models={**base.models, model: spec},
        links={id: steady_link(found.rtt_s[id], found.jitter_s[id]) for id in found.tables_ms},
        edges=tuple(
            EdgeGroup(
                name=id.removeprefix("edge/"), count=1, link=id,
                edge_ms={model: found.tables_ms[id]}, noise_sigma=found.sigma[id],
            )
            for id in edges
        ),
        pools=(PoolSpec(name=pool.removeprefix("pool/"), link=pool, noise_sigma=found.sigma[pool]),),
        faults=tuple(faults),
    )  # fmt: skip


def _simulated(id: str) -> str:
    """The simulator numbers the devices of a group."""
    return f"{id}-1" if id.startswith("edge/") else id


# the real side


class Real:
    """A running fleet, and runs on it."""

    def __init__(self, fleet: Fleet, stack: FleetStack, scratch: Path) -> None:
        self.fleet = fleet
        self.stack = stack
        self._scratch = scratch
        self._tokens = fleet.tokens()
        self._send(str(fleet.path), 0.3 * fleet.knee_rps, _RUN_IN_S, seed=0)  # first calls are slow once and for all
        self.tables_ms = self._tables()
        self._pool_ratios = self._alone()

    def run(self, policy: str, rate: float, seconds: float, seed: int) -> tuple[Told, Measured]:
        self.stack.restart_gateway(policy=policy)
        base = self.fleet.scenario
        answers, words = self._send(str(self.fleet.path), rate, seconds, seed)
        counted = [one for one in answers if one.at >= base.lasting(seconds).warmup_s]
        return _told(counted, words["late_p99_s"]), self._measured(answers)

    def _send(self, scenario: str, rate: float, seconds: float, seed: int) -> tuple[list[Answer], dict[str, float]]:
        path = self._scratch / "answers.json"
        command = {
            "scenario": scenario, "rate": rate, "seconds": seconds, "seed": seed, "model": self.fleet.model,
            "port": int(self.stack.http.rpartition(":")[2]), "answers": str(path), "tokens": self._tokens,
        }  # fmt: skip
        words = asyncio.run(sent(command))
        return [Answer(**one) for one in json.loads(path.read_text())], words

    def _tables(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """What each target measured at its warm-up, from the offers that the gateway got."""
        found = {}
        for id, target in self.stack.targets().items():
            (costs,) = (one["costs"] for one in target["models"] if one["name"] == self.fleet.model)
            (cost,) = costs.values()
            found[id] = tuple((float(units), float(ms)) for units, ms in cost["measured"])
        return found

    def _alone(self) -> list[float]:
        """Of lone calls to the pool, how long each took against its table: there are no batch-mates to tell apart."""
        pool = CostTable(self.tables_ms["pool/pool"])
        ratios = []
        for turn in range(_ALONE):
            length = (16, 64, 200)[turn % 3]
            compute_s = self.fleet.lone_call(self.stack.http, length, self._tokens)
            ratios.append(compute_s / (pool.seconds_for(length) / 1e3))
        return ratios

    def _measured(self, answers: Sequence[Answer]) -> Measured:
        drift, sigma, rtt_s, jitter_s = {}, {}, {}, {}
        for id, points in self.tables_ms.items():
            cost = CostTable(points)
            own = [one for one in answers if one.served_by == id and one.compute_s > 0.0]
            lone = [one.compute_s * 1e3 / cost.seconds_for(one.units) for one in own]
            ratios = self._pool_ratios if id.startswith("pool/") and not self.fleet.seldom_batched else lone
            drift[id], sigma[id] = drift_of(ratios)
            links = [one.link_s for one in own]
            rtt_s[id] = statistics.fmean(links) if links else 0.002
            jitter_s[id] = statistics.fmean(abs(one - rtt_s[id]) for one in links) if links else 0.001
        return Measured(self.tables_ms, drift, sigma, rtt_s, jitter_s)


async def sent(command: Mapping[str, Any]) -> dict[str, float]:
    async with Child("open loop", "-m", "tests.bench.open_loop") as child:
        await child.command(**command)
        await asyncio.sleep(command["seconds"])  # noqa: TID251 - longer than a child may otherwise be silent
        return await child.line()


def _told(answers: Sequence[Answer], late_p99_s: float) -> Told:
    given = [one for one in answers if one.status == 200]
    served = Counter(one.served_by for one in given)
    latencies = [one.budget_s - one.left_s for one in given]
    cuts = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else [0.0] * 99
    return Told(
        attainment=sum(one.left_s >= 0.0 for one in given) / max(1, len(answers)),
        shares={id: count / len(given) for id, count in served.items()},
        arrivals=len(answers),
        p50_s=cuts[49],
        p99_s=cuts[98],
        callers=sum(one.latency_s <= one.budget_s for one in given) / max(1, len(answers)),
        late_p99_s=late_p99_s,
    )


# the simulated side


def simulated(loaded: LoadedScenario, found: Measured, policy: str, rate: float, seconds: float, seed: int) -> Told:
    scenario = measured_scenario(loaded.scenario, found).lasting(seconds).with_rate(rate)
    tally = simulate(loaded.replaced(scenario), policy, seed).tally
    answers = max(1, tally.served_by.total())
    shares: Counter[str] = Counter()
    for id, count in tally.served_by.items():
        shares[id.removesuffix("-1") if id.startswith("edge/") else id] += count
    return Told(
        attainment=tally.all.attainment,
        shares={id: count / answers for id, count in shares.items()},
        arrivals=tally.all.arrivals,
        p50_s=tally.all.latencies.quantile_s(0.5),
        p99_s=tally.all.latencies.quantile_s(0.99),
    )


# both


def compare(fleet: Fleet, plan: Plan, report: Report) -> None:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        began_at = time.perf_counter()
        running = stack.enter_context(fleet.stack(scratch))
        real = Real(fleet, running, scratch)
        print(f"{fleet.name}: {len(running.parts)} processes and a broker in {time.perf_counter() - began_at:.0f} s")
        pairs = _run_pairs(real, plan)
    _show(fleet, pairs)
    _judge(fleet, pairs, report)


def _run_pairs(real: Real, plan: Plan) -> list[Pair]:
    """Policies and loads in turn within each repeat; what disturbs one disturbs its neighbours too."""
    fleet = real.fleet
    loaded = load(str(fleet.path))
    pairs = [Pair(policy, at) for at in plan.loads for policy in POLICIES]
    for repeat in range(1, plan.repeats + 1):
        for pair in pairs if repeat % 2 else reversed(pairs):
            rate = pair.load * fleet.knee_rps
            told, found = real.run(pair.policy, rate, plan.seconds, repeat)
            pair.real.append(told)
            pair.simulated.append(simulated(loaded, found, pair.policy, rate, plan.seconds, repeat))
        print(f"{fleet.name}: repeat {repeat} of {plan.repeats} done", file=sys.stderr, flush=True)
    return pairs


def _show(fleet: Fleet, pairs: Sequence[Pair]) -> None:
    sides = [(pair, name, side) for pair in pairs for name, side in (("real", pair.real), ("sim", pair.simulated))]
    header = ("", "requests", "in time %", "callers' %", "p50 ms", "p99 ms", "shares %", "sent late p99 ms")
    table(header, [(f"{pair.policy} {pair.load:g} {name}", *_row(fleet, side)) for pair, name, side in sides])


def _row(fleet: Fleet, side: Sequence[Told]) -> tuple[object, ...]:
    callers = [told.callers for told in side if told.callers is not None]
    return (
        side[0].arrivals,
        f"{Spread.of(100.0 * told.attainment for told in side):.1f}",
        f"{100.0 * statistics.median(callers):.1f}" if callers else "-",
        f"{1e3 * statistics.median(told.p50_s for told in side):.0f}",
        f"{1e3 * statistics.median(told.p99_s for told in side):.0f}",
        " ".join(f"{100 * statistics.fmean(told.shares.get(id, 0.0) for told in side):.0f}" for id in fleet.ids),
        f"{1e3 * max(told.late_p99_s for told in side):.0f}" if callers else "-",
    )


def _judge(fleet: Fleet, pairs: Sequence[Pair], report: Report) -> None:
    found: dict[str, Any] = {}
    for pair in pairs:
        name = f"{fleet.name}_{pair.policy}_at_{pair.load:g}"
        shares = pair.share_gaps()
        widest = max(shares, key=lambda id: abs(shares[id].median))
        found[f"{pair.policy}_at_{pair.load:g}"] = {
            "attainment_real": Spread.of(told.attainment for told in pair.real),
            "attainment_gap": pair.attainment_gap,
            "share_gaps": shares,
            "sent_late_p99_s": Spread.of(told.late_p99_s for told in pair.real),
        }
        report.goal(Goal(f"{name}_attainment_gap", abs(pair.attainment_gap.median), fleet.attainment_aim, "<="))
        report.goal(Goal(f"{name}_share_gap", abs(shares[widest].median), SHARE_AIM, "<=", why=f"widest: {widest}"))
    report.figures[fleet.name] = found | {
        "widest_attainment_gap": max(abs(pair.attainment_gap.median) for pair in pairs),
        "widest_share_gap": max(abs(gap.median) for pair in pairs for gap in pair.share_gaps().values()),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--fleet", choices=(*FLEETS, "both"), default="both")
    chosen = options.parse_args()
    plan = Plan(
        repeats=chosen.repeats or (1 if chosen.quick else 3),
        seconds=chosen.seconds or (10.0 if chosen.quick else 30.0),
        loads=LOADS[1:2] if chosen.quick else LOADS,
    )
    report = Report("sim_vs_real", {"policies": POLICIES, "fleet": chosen.fleet, **_plain(plan)})
    paced_engine(report, calls=100 if chosen.quick else 500)
    for name, fleet in FLEETS.items():
        if chosen.fleet in (name, "both"):
            compare(fleet(), plan, report)
            print()
    report.write()


def paced_engine(report: Report, calls: int) -> None:
    """How late a paced engine is with its answer, and what its waiting costs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pace.yaml"
        path.write_text("{input: ids, inputs: {ids: [batch]}, cost_ms: [[1, 10]]}")
        engine = PacedEngine(path, outputs=("y",))
        ids = {"ids": np.ones(1, dtype=np.int64)}
        late_s = []
        cpu_before = time.thread_time()
        for _ in range(calls):
            began_at = clock.now()
            engine.infer(ids)
            late_s.append(clock.now() - began_at - 0.010)
        cpu_us = 1e6 * (time.thread_time() - cpu_before) / calls
    p50_ms, p99_ms = (1e3 * float(np.percentile(late_s, at)) for at in (50, 99))
    print(f"paced engine: {p50_ms:.3f} ms late (p99 {p99_ms:.2f}) of 10 ms, {cpu_us:.0f} µs of CPU a call\n")
    report.figures["paced_engine"] = {"late_p50_ms": p50_ms, "late_p99_ms": p99_ms, "cpu_us": cpu_us}
    report.goal(Goal("paced_engine_late_p50_ms", p50_ms, 0.3, "<="))


def _plain(plan: Plan) -> dict[str, Any]:
    return {"repeats": plan.repeats, "seconds": plan.seconds, "loads": plan.loads}


if __name__ == "__main__":
    main()

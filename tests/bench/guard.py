"""The bench guard fails where a request costs more CPU than its budget, against the least that it could cost.

What is guarded and its floor serve the same load at the same time, on the same core: a neighbour that empties caches, a
host that lends its core to another machine and a clock that slows down hit both alike. Measured one after the other,
the ratio of their CPU time a request moves by a third with what else runs; measured together it stays within some
per cent beside two busy loops on two cores. (It is larger than that of `gateway_overhead`, because each empties the
other's caches, and means something beside itself only.) The median of some rounds is held against `budget.toml`, which
says how the slack was found; what is over its budget is measured a second time, and all rounds together decide.

A ratio that is far below its budget fails nothing, but the guard would no longer see it grow by a quarter: it says so,
and `--set` writes the budgets anew from this run.

    python -m tests.bench.guard [--repeats 3] [--only gateway] [--set] [--record]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.bench import agent_hop, history, pool_server, provenance, workload
from tests.bench.gateway_overhead import Measured, Timing, measure, start_systems
from tests.bench.harness import Child, Spread, cores, machine, parser, table
from tidegate.tools.build.demo.paced import PacedCosts, PacedNoise, add_paced

BUDGET: Final = Path(__file__).parent / "budget.toml"
SLACK: Final = 1.12  # budget over the median: a growth by a quarter exceeds it by as much again
ROUNDS: Final = 4  # of a repeat
ROUND: Final = Timing(repeats=ROUNDS, seconds=1.0, warmup_s=0.2)
CONNECTIONS: Final = 16  # of each of the two
FLOOR: Final = "floor"

Ratios = dict[str, list[float]]


async def gateway() -> Ratios:
    """The gateway over both transports, each beside a bare forwarder."""
    core, other_core = cores()
    async with AsyncExitStack() as stack:

        async def child(name: str) -> Child:
            return await stack.enter_async_context(Child(name, "-m", f"tests.bench.{name}", core=other_core))

        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-guard-")))
        folder = scratch / "models" / workload.MODEL / "1"
        folder.mkdir(parents=True)
        (folder / "model.yaml").write_text(workload.MANIFEST)
        upstream = await child("upstream_server")
        systems = await start_systems(stack, upstream.ready["ports"], scratch, await child("load_generator"), core)
        beside = await child("load_generator")
        return await together(
            systems[FLOOR], {name: replace(one, generator=beside) for name, one in systems.items() if name != FLOOR}
        )


async def together(floor: Measured, systems: Mapping[str, Measured]) -> Ratios:
    """CPU a request of each system over the floor's at the same time."""
    found: Ratios = {name: [] for name in systems}
    for _ in range(ROUNDS):
        for name, system in systems.items():
            least, point = await asyncio.gather(*(measure(one, [], CONNECTIONS, ROUND) for one in (floor, system)))
            found[name].append(point.cpu_s / least.cpu_s)
    return found


async def pool() -> Ratios:
    """The pool's server by both ways in, each beside a bare echo of the same frames; its worker is not counted."""
    core, other_core = cores()
    found: Ratios = {way: [] for way in pool_server.TRANSPORTS}
    async with AsyncExitStack() as stack:

        async def child(name: str, core: int | None) -> Child:
            return await stack.enter_async_context(Child(name, "-m", f"tests.bench.{name}", core=core))

        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-guard-")))
        echo = await child("pool_echo", core)
        floor = pool_server.System(echo, echo.ready["addresses"]["grpc"])
        system = await pool_server.start_pool(stack, scratch, core, other_core)
        callers = [(one, await child("pool_caller", other_core)) for one in (floor, system)]
        for _ in range(ROUNDS):
            for way, samples in found.items():
                least, point = await asyncio.gather(
                    *(pool_server.measure(one, caller, way, CONNECTIONS, ROUND) for one, caller in callers)
                )
                samples.append(point.server_cpu_s / least.server_cpu_s)
    return found


def instant(models: Path) -> Path:
    """A repository with the model that the bench's agent serves."""
    costs = PacedCosts(edge_ms=((1.0, 1e3 * agent_hop.MODEL_S), (8192.0, 1e3 * agent_hop.MODEL_S)))
    add_paced(workload.MODEL, costs, models, noise=PacedNoise(edge=0.0))
    return models


async def agent() -> Ratios:
    """All processes of an edge agent, beside a bare echo of the same frames."""
    core, other_core = cores()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-guard-")))
        echo = await enter(Child("link_echo", "-m", "tests.bench.link_echo", core=core))
        floor = agent_hop.Running(echo.pid, echo.ready["addresses"]["grpc"])
        system = await enter(agent_hop.agent(scratch / "agent", instant(scratch / "models"), core=core))
        callers = [(one, await enter(agent_hop.hop_client(one.address, other_core))) for one in (floor, system)]
        found: Ratios = {"link": []}
        for _ in range(2 * ROUNDS):
            least, point = await asyncio.gather(
                *(agent_hop.measure(one, caller, CONNECTIONS, ROUND) for one, caller in callers)
            )
            found["link"].append(point.cpu_s / least.cpu_s)
    return found


# What is guarded, by its section in budget.toml: one repeat, with processes of its own.
GUARDED: Final[dict[str, Callable[[], Awaitable[Ratios]]]] = {"gateway": gateway, "pool": pool, "agent": agent}


@dataclass(frozen=True)
class Held:
    """A ratio beside its budget."""

    name: str
    ratio: Spread
    budget: float

    @property
    def is_over(self) -> bool:
        return self.ratio.median > self.budget

    @property
    def is_blind(self) -> bool:
        """Whether a growth by a quarter would pass unseen."""
        return 1.25 * self.ratio.median < self.budget


def held(part: str, found: Ratios, budget: Mapping[str, float]) -> list[Held]:
    """Every ratio of a part beside its budget; one that has none is only told."""
    return [
        Held(f"{part}.{name}", Spread.of(samples), budget.get(name, float("inf"))) for name, samples in found.items()
    ]


async def guarded(part: str, repeats: int, budget: Mapping[str, float]) -> list[Held]:
    """A part's ratios, measured twice where the first look finds one over its budget."""
    found: Ratios = {}
    await _look(part, repeats, found)
    if any(one.is_over for one in held(part, found, budget)):
        print(f"{part}: over its budget at first look, measured again", file=sys.stderr, flush=True)
        await _look(part, repeats, found)
    return held(part, found, budget)


async def _look(part: str, repeats: int, found: Ratios) -> None:
    for _ in range(repeats):
        for name, samples in (await GUARDED[part]()).items():
            found.setdefault(name, []).extend(samples)


def told(found: Sequence[Held]) -> int:
    """Print every ratio, and the way out where one is over its budget; the exit status."""
    rows = [(one.name, f"{one.ratio:.2f}", f"{one.budget:.2f}", "over" if one.is_over else "kept") for one in found]
    table(("CPU a request over the floor's", "ratio", "budget", ""), rows)
    for one in found:
        if one.is_over:
            print(
                f"{one.name}: {one.ratio.median:.2f} times the floor's CPU a request where {one.budget:.2f} are "
                f"budgeted ({BUDGET.name}). `python -m tests.bench.gateway_overhead` shows where it goes. A cost that "
                "is worth it raises the budget in the same commit, which says what it pays for."
            )
        elif one.is_blind:
            print(f"{one.name}: {one.ratio.median:.2f} is far below {one.budget:.2f}: lower it (--set)")
    return 1 if any(one.is_over for one in found) else 0


def with_budgets(text: str, found: Sequence[Held]) -> str:
    """budget.toml with each measured ratio's budget set anew; comments and other lines stay."""
    fresh = {one.name: SLACK * one.ratio.median for one in found}
    lines, section = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
        key = line.partition("=")[0].strip()
        lines.append(f"{key} = {fresh[f'{section}.{key}']:.2f}" if f"{section}.{key}" in fresh else line)
    return "\n".join(lines) + "\n"


def record(found: Sequence[Held]) -> None:
    """Add the ratios of this commit to the history."""
    at = provenance.measured_at("guard", provenance.PRODUCT)
    if not at["commit"] or at["uncommitted"]:
        raise SystemExit(f"no commit has this code: {', '.join(at['uncommitted']) or 'there is no git'}")
    on = machine()
    history.add(
        history.Line(
            date=history.commit_date(at["commit"]) or at["date"],
            commit=at["commit"][: provenance.SHORT],
            bench="guard",
            figure=one.name,
            median=one.ratio.median,
            low=one.ratio.low,
            high=one.ratio.high,
            machine=f"{on['cpu']}, {on['cores']} cores",
        )
        for one in found
    )
    print(f"added to {history.HISTORY.name}: make figures draws it")


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--only", choices=GUARDED, help="one part alone")
    options.add_argument("--set", action="store_true", help="write budget.toml anew from this run")
    options.add_argument("--record", action="store_true", help="add this commit to history.csv")
    chosen = options.parse_args()
    budgets = tomllib.loads(BUDGET.read_text())
    found: list[Held] = []
    for part in [chosen.only] if chosen.only else GUARDED:
        budget = {} if chosen.set else budgets.get(part, {})
        found += asyncio.run(guarded(part, chosen.repeats or (1 if chosen.quick else 3), budget))
    status = told(found)
    if chosen.set:
        BUDGET.write_text(with_budgets(BUDGET.read_text(), found))
        print(f"wrote {BUDGET.name}")
    if chosen.record:
        record(found)
    sys.exit(status)


if __name__ == "__main__":
    main()

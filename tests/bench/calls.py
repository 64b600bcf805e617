"""How many Python functions the serving processes call for one request: a figure that no other load can disturb.

CPU time moves with what else the machine does; the number of calls does not, and where a request costs more, it is
nearly always because more is called for it. So this is what `make test` holds against a budget (`[calls]` in
`budget.toml`), and `guard` holds CPU time where a machine is quiet. One request at a time, the least that a request can
be: with many at once, what is shared by a turn of the event loop would count for less. A function that is called less
than once in two requests counts for nothing: it is what the process does by itself, by the clock.

    python -m tests.bench.calls [--quick] [--set] [--top 20]
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench import agent_hop, pool_server, workload
from tests.bench.gateway_overhead import gateway
from tests.bench.guard import BUDGET, instant
from tests.bench.harness import Child, Goal, Report, parser, table
from tidegate import clock

SLACK: Final = 1.1  # budget over what was counted: counts of one commit differ by 1 or 2 %
LEAST: Final = 0.5  # calls a request
WARM_UP_S: Final = 0.3
LOAD_S: Final = 0.8
WINDOWS: Final = 3  # of which the median counts
_COUNTED_WITHIN_S: Final = 30.0
Load = Callable[[float], Awaitable[int]]  # for so many seconds; returns how many requests were answered


@dataclass(frozen=True)
class Counted:
    """Of a request at the process that serves it; at its workers nothing is counted.

    Args:
        by_function: calls of Python functions.
        garbage: objects that only a garbage collection frees.
    """

    by_function: Counter[str]
    garbage: float

    @property
    def calls(self) -> float:
        return sum(self.by_function.values())


class Window:
    """Counts in a process that runs under `call_counter`."""

    def __init__(self, pid: int, out: Path) -> None:
        self._pid = pid
        self._out = out
        self._seen = 0

    async def count(self, load: Load) -> Counted:
        os.kill(self._pid, signal.SIGUSR1)
        requests = await load(LOAD_S)
        os.kill(self._pid, signal.SIGUSR2)
        async with asyncio.timeout(_COUNTED_WITHIN_S):
            while len(lines := await asyncio.to_thread(self._lines)) <= self._seen:
                await clock.sleep(0.02)
        self._seen = len(lines)
        found, requests = json.loads(lines[-1]), max(requests, 1)
        each = {name: calls / requests for name, calls in found["functions"].items()}
        often = Counter({name: calls for name, calls in each.items() if calls >= LEAST})
        return Counted(often, found["garbage"] / requests)

    def _lines(self) -> list[str]:
        """Those that are written to their end."""
        text = self._out.read_text() if self._out.exists() else ""
        return text.split("\n")[:-1]


async def counted(pid: int, out: Path, load: Load) -> Counted:
    await load(WARM_UP_S)
    window = Window(pid, out)
    found = [await window.count(load) for _ in range(WINDOWS)]
    return sorted(found, key=lambda one: one.calls)[WINDOWS // 2]


def load_by(generator: Child, **words: Any) -> Load:
    async def load(seconds: float) -> int:
        await generator.command(connections=1, warmup_s=0.0, seconds=seconds, **words)
        await generator.line()
        return int((await generator.line())["requests"])

    return load


async def of_gateway(stack: AsyncExitStack, scratch: Path) -> dict[str, Counted]:
    folder = scratch / "models" / workload.MODEL / "1"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(workload.MANIFEST)
    upstream = await stack.enter_async_context(Child("targets", "-m", "tests.bench.upstream_server"))
    generator = await stack.enter_async_context(Child("load", "-m", "tests.bench.load_generator"))
    found = {}
    for transport in ("link", "unary"):
        out = scratch / f"{transport}.calls"
        through = ("tests.bench.call_counter", str(out))
        async with gateway(transport, upstream.ready["ports"], scratch, core=None, through=through) as (child, port):
            found[f"gateway_{transport}"] = await counted(child.pid, out, load_by(generator, port=port))
    return found


async def of_pool(stack: AsyncExitStack, scratch: Path) -> dict[str, Counted]:
    out = scratch / "pool.calls"
    through = ("tests.bench.call_counter", str(out))
    system = await pool_server.start_pool(stack, scratch, None, None, through)
    caller = await stack.enter_async_context(Child("caller", "-m", "tests.bench.pool_caller"))
    load = load_by(caller, transport="link", address=system.address)
    return {"pool_link": await counted(system.child.pid, out, load)}


async def of_agent(stack: AsyncExitStack, scratch: Path) -> dict[str, Counted]:
    out = scratch / "agent.calls"
    through = ("tests.bench.call_counter", str(out))
    system = await stack.enter_async_context(
        agent_hop.agent(scratch / "agent", instant(scratch / "models"), through=through)
    )
    client = await stack.enter_async_context(agent_hop.hop_client(system.address, None))
    return {"agent_link": await counted(system.pid, out, load_by(client))}


async def all_parts() -> dict[str, Counted]:
    """Calls a request of every serving process, by its name in `budget.toml`."""
    found: dict[str, Counted] = {}
    for part in (of_gateway, of_pool, of_agent):
        async with AsyncExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-calls-")))
            found |= await part(stack, scratch)
    return found


def budgets() -> dict[str, float]:
    return dict(tomllib.loads(BUDGET.read_text())["calls"])


def show(found: dict[str, Counted], budget: dict[str, float], top: int) -> None:
    rows = [(name, f"{one.calls:.0f}", f"{budget.get(name, float('inf')):.0f}") for name, one in found.items()]
    table(("calls of Python functions a request", "counted", "budget"), rows)
    for name, one in found.items() if top else ():
        print(f"\n{name}")
        for function, calls in one.by_function.most_common(top):
            print(f"  {calls:7.2f}  {function}")


def with_budgets(text: str, found: dict[str, Counted]) -> str:
    """budget.toml with the section `calls` written anew."""
    head = text.partition("[calls]\n")[0]
    return head + "[calls]\n" + "".join(f"{name} = {SLACK * one.calls:.0f}\n" for name, one in found.items())


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--set", action="store_true", help="write the budgets anew from this run")
    options.add_argument("--top", type=int, default=0, help="show so many functions of each")
    chosen = options.parse_args()
    found = asyncio.run(all_parts())
    if chosen.set:
        BUDGET.write_text(with_budgets(BUDGET.read_text(), found))
    budget = budgets()
    show(found, budget, chosen.top)
    report = Report("calls", {"load_s": LOAD_S, "windows": WINDOWS})
    report.figures |= {name: one.calls for name, one in found.items()}
    for name, one in found.items():
        report.goal(Goal(f"{name}_calls", one.calls, budget[name], "<="))
    report.write()


if __name__ == "__main__":
    main()

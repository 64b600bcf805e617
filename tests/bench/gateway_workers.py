"""A gateway of two workers beside one process and beside two gateways: CPU a request, connections, what a kill costs.

    callers (this process) ──HTTP──▶ one process, or two workers, or two gateways ──link──▶ 2 pools (`engine: paced`)

CPU: all run, and load comes to each in turn, so many requests in flight for each process that serves; counted is the
CPU time of all processes, parent and keeper included. A process with fewer requests in flight takes more a request,
since it writes and wakes for fewer at a time: so the same load is also given to one process and to two workers, and
two gateways that share nothing show what of the difference comes from there. Connections: so many new ones, by HTTP
and by gRPC, and how many each worker has. A kill: SIGKILL to one worker under load, each request on a connection of
its own.

    python -m tests.bench.gateway_workers [--quick] [--repeats N] [--seconds EACH]
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
import psutil
import yaml

from tests.bench import workload
from tests.bench.discovery import BODY, PATH, start_pool
from tests.bench.harness import Child, Goal, Report, Spread, parser, ratios, table
from tidegate import clock
from tidegate.tools.build.demo.paced import PacedCosts, PacedNoise, add_paced

WORKERS: Final = 2
POOLS: Final = 2
POOL_MS: Final = 2.0
IN_FLIGHT: Final = 32
CONNECTIONS: Final = 200
KILLERS: Final = 16  # callers while a worker is killed
HEADERS: Final = {"tidegate-budget-ms": "10000"}


@dataclass
class LoadOutcome:
    """What became of the requests of one stretch."""

    statuses: Counter[int] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    refused: int = 0

    @property
    def failed(self) -> int:
        return len(self.broken) + sum(count for status, count in self.statuses.items() if status != 200)


async def load(url: str, seconds: float, callers: int, *, keep: bool = True) -> LoadOutcome:
    """So many callers, each with a connection of its own, or a new one for each request."""
    told, until = LoadOutcome(), clock.now() + seconds

    async def caller() -> None:
        connector = aiohttp.TCPConnector(force_close=not keep)
        async with aiohttp.ClientSession(connector=connector) as session:
            while clock.now() < until:
                try:
                    async with session.post(url + PATH, data=BODY, headers=HEADERS) as answer:
                        await answer.read()
                        told.statuses[answer.status] += 1
                except aiohttp.ClientConnectorError as error:
                    told.refused += 1
                    told.broken.append(str(error))
                except aiohttp.ClientError as error:
                    told.broken.append(repr(error))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(caller())
    return told


def cpu_s(pid: int) -> float:
    """The CPU time of a process and of all that it started and that run."""
    total = 0.0
    parent = psutil.Process(pid)
    for one in (parent, *parent.children(recursive=True)):
        times = one.cpu_times()
        total += times.user + times.system
    return total


def cpu_of(gateways: list[tuple[Child, int]]) -> float:
    return sum(cpu_s(pid) for _, pid in gateways)


async def cpu_a_request(gateways: list[tuple[Child, int]], seconds: float, callers: int) -> float:
    """In microseconds, of all these gateways, with so many callers in all."""
    before = cpu_of(gateways)
    urls = [one.ready["addresses"]["http"] for one, _ in gateways]
    told = await asyncio.gather(*(load(url, seconds, callers // len(urls)) for url in urls))
    return 1e6 * (cpu_of(gateways) - before) / sum(one.statuses[200] for one in told)


async def start_gateway(
    stack: AsyncExitStack, folder: Path, name: str, workers: int, pools: dict[str, str]
) -> tuple[Child, int]:
    """The gateway, and its parent's process id."""
    config = folder / f"{name}.yaml"
    ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
    words: dict[str, Any] = {
        "name": name, "workers": workers, "model_repository": str(folder / "models"), "log_level": "error",
        "targets": [{"name": one, "address": at} for one, at in pools.items()],
    }  # fmt: skip
    config.write_text(yaml.safe_dump({**ports, **words}))
    child = Child(name, "-m", "gateway", "--config", str(config), log=folder / f"{name}.log")
    await stack.enter_async_context(child)
    while child.ready["event"] != "ready":
        child.ready = await child.line()
    found = next(
        one.pid for one in psutil.Process().children() if str(config) in one.cmdline() and "--part" not in one.cmdline()
    )
    return child, found


async def members(admin: str) -> dict[str, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(admin + "/v1/state") as answer:
        return {one["name"]: one for one in (await answer.json())["workers"]}


async def http_split(gateway: Child) -> float:
    """The share of new HTTP connections that the first worker has."""
    admin, url = gateway.ready["addresses"]["admin"], gateway.ready["addresses"]["http"] + PATH
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        asked = [session.post(url, data=BODY, headers=HEADERS) for _ in range(CONNECTIONS)]
        for answer in await asyncio.gather(*asked):
            await answer.read()
        await clock.sleep(2.5)  # each worker says once a second how many it has
        found = await members(admin)
    held = [found[f"worker-{number}"]["connections"] for number in range(1, WORKERS + 1)]
    return held[0] / max(1, sum(held))


async def grpc_split(gateway: Child) -> float:
    """The share of new gRPC connections that the first worker has."""
    address = gateway.ready["addresses"]["grpc"]
    port = int(address.rpartition(":")[2])
    pid = (await members(gateway.ready["addresses"]["admin"]))["worker-1"]["pid"]
    async with AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CONNECTIONS)]
        for channel in channels:
            await stack.enter_async_context(channel)
        live = [channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"") for channel in channels]
        await asyncio.gather(*live)
        held = sum(
            one.status == psutil.CONN_ESTABLISHED and bool(one.laddr) and one.laddr.port == port
            for one in psutil.Process(pid).net_connections("tcp")
        )
    return held / CONNECTIONS


async def killed(gateway: Child, seconds: float) -> tuple[LoadOutcome, float]:
    """What became of requests while a worker was killed, and after how many seconds it was back."""
    admin, url = gateway.ready["addresses"]["admin"], gateway.ready["addresses"]["http"]
    pid = (await members(admin))["worker-1"]["pid"]
    calling = asyncio.create_task(load(url, seconds, KILLERS, keep=False))
    await clock.sleep(1.0)
    killed_at = clock.now()
    os.kill(pid, signal.SIGKILL)
    while True:
        one = (await members(admin))["worker-1"]
        if one["pid"] not in (0, pid) and one["state"] == "ready":
            break
        await clock.sleep(0.05)
    back_s = clock.now() - killed_at
    return await calling, back_s


async def bench(repeats: int, seconds: float) -> Report:
    report = Report("gateway_workers", {"repeats": repeats, "seconds": seconds, "in_flight": IN_FLIGHT})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        rows = 32 * workload.TOKENS
        costs = PacedCosts(pool_ms=((workload.TOKENS, POOL_MS), (rows, 4 * POOL_MS)))
        add_paced(workload.MODEL, costs, folder / "models", noise=PacedNoise(pool=0.05))
        pools = {}
        for number in range(POOLS):
            pools[f"p{number}"] = (await start_pool(stack, folder, f"p{number}", {})).ready["addresses"]["grpc"]
        one, one_pid = await start_gateway(stack, folder, "one", 1, pools)
        two, two_pid = await start_gateway(stack, folder, "two", WORKERS, pools)
        apart = [await start_gateway(stack, folder, f"apart{number}", 1, pools) for number in range(WORKERS)]
        sets = {"one": [(one, one_pid)], "two": [(two, two_pid)], "apart": apart}
        for gateway, _ in (gateway for held in sets.values() for gateway in held):
            await load(gateway.ready["addresses"]["http"], 2.0, IN_FLIGHT)
        rest: dict[str, float] = {}  # CPU seconds a second
        for name in ("one", "two"):
            before = cpu_of(sets[name])
            await clock.sleep(seconds)
            rest[name] = (cpu_of(sets[name]) - before) / seconds
        found: dict[str, list[float]] = {name: [] for name in ("one", "two", "apart", "two_same_load")}
        many = WORKERS * IN_FLIGHT
        for repeat in range(repeats):
            for name, held, callers in (
                ("one", sets["one"], IN_FLIGHT),
                ("two", sets["two"], many),
                ("apart", sets["apart"], many),
                ("two_same_load", sets["two"], IN_FLIGHT),
            ):
                found[name].append(await cpu_a_request(held, seconds, callers))
            print(f"  {repeat + 1}: " + ", ".join(f"{name} {of[-1]:.0f} µs" for name, of in found.items()), flush=True)
        over = ratios(found["two"], found["one"])
        by_http = [await http_split(two) for _ in range(repeats)]
        by_grpc = [await grpc_split(two) for _ in range(repeats)]
        told, back_s = await killed(two, max(8.0, 2 * seconds))
    farthest = max(abs(share - 0.5) for share in (*by_http, *by_grpc))
    over_apart, same_load = ratios(found["two"], found["apart"]), ratios(found["two_same_load"], found["one"])
    report.figures |= {
        **{f"{name}_us": Spread.of(of) for name, of in found.items()},
        "two_over_one": over, "two_over_apart": over_apart, "two_over_one_same_load": same_load, "rest": rest,
        "http_share": Spread.of(by_http), "grpc_share": Spread.of(by_grpc),
        "kill": {"answered": told.statuses[200], "lost": len(told.broken), "refused": told.refused, "back_s": back_s},
    }  # fmt: skip
    table(
        ("", "figure"),
        [
            ("CPU a request, two workers over one process", f"{over:.3f}"),
            ("... over two gateways that share nothing", f"{over_apart:.3f}"),
            ("... over one process, with half its load on each", f"{same_load:.3f}"),
            ("cores at rest: one process, two workers", f"{rest['one']:.3f}, {rest['two']:.3f}"),
            ("first worker's share of HTTP connections", f"{report.figures['http_share']:.3f}"),
            ("first worker's share of gRPC connections", f"{report.figures['grpc_share']:.3f}"),
            ("worker killed: answered, lost, refused", f"{told.statuses[200]}, {len(told.broken)}, {told.refused}"),
            ("... back after", f"{back_s:.1f} s"),
        ],
    )
    report.goal(Goal("gateway_workers_cpu_of_2_over_one_process", over.median, 1.05, "<="))
    report.goal(Goal("gateway_workers_cpu_of_2_over_two_gateways", over_apart.median, 1.05, "<="))
    report.goal(Goal("gateway_workers_farthest_from_half_of_200_connections", farthest, 0.10, "<="))
    report.goal(Goal("gateway_workers_refused_after_a_kill", told.refused, 0, "<="))
    report.goal(Goal("gateway_workers_failed_after_a_kill", told.failed, KILLERS, "<="))
    return report


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    repeats = chosen.repeats or (1 if chosen.quick else 5)
    asyncio.run(bench(repeats, chosen.seconds or (4.0 if chosen.quick else 10.0))).write()


if __name__ == "__main__":
    main()

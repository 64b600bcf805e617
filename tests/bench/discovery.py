"""How soon a gateway uses a pool that a source of discovery lists, and how soon it stops once the source takes it off.

    callers (this process) ──HTTP──▶ gateway ──link──▶ pools (processes; `engine: paced`), of which one comes and goes
    the source: a file that is replaced; a DNS server in this process (SRV records, TTL 0); an API server of Kubernetes
    in this process (kmock); or the pools themselves, which announce themselves through a Mosquitto

For each source, in one run under a steady load: `repeats` times a pool is started, listed when it says that it is
ready, taken off the list (in Kubernetes: terminating), and ended two seconds later, as an orchestrator does it. A pool
that announces itself is listed by being ready, and off the list from its SIGTERM on; it drains for two seconds. Then
the source is away for a minute: the file is gone, the name server answers SERVFAIL, the API server or the broker is
ended and comes back. A request counts as new at the instant that its caller
sent it, which is before the gateway placed it. The pools are two thirds busy: a pool that nobody needs may stay
without a request for as long as the others are the better choice, and that would not be discovery's doing.

    python -m tests.bench.discovery [--quick] [--repeats N] [--seconds AWAY]
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
import yaml

from tests.bench import workload
from tests.bench.harness import Child, Goal, Report, Spread, parser, table
from tests.support.discovery.cluster_api import ClusterApi, endpoint, slice_of
from tests.support.discovery.dns_server import DnsServer
from tests.support.mqtt.brokers import Mosquitto
from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask
from tidegate.tools.build.demo.paced import PacedCosts, PacedNoise, add_paced

RATE: Final = 90.0  # requests a second: two thirds of what two pools can do, so that a third one is of use
POOL_MS: Final = 15.0  # a request takes, also in a batch
ROWS: Final = 32
BACK_S: Final = 5.0  # after the source is back, in which nothing may be lost either
STAY_S: Final = 2.0  # how long a pool serves after it was taken off the list
NAME: Final = "_grpc._tcp.pools.test"
PATH: Final = f"/v2/models/{workload.MODEL}/infer"
BODY: Final = json.dumps(
    {
        "inputs": [
            {"name": name, "datatype": "INT64", "shape": [1, workload.TOKENS], "data": [1] * workload.TOKENS}
            for name in ("input_ids", "attention_mask")
        ]
    }
)


class ListedPools(Protocol):
    """A source whose list the bench keeps."""

    def section(self) -> dict[str, Any]: ...

    def list(self, pools: dict[str, str]) -> None:
        """From now on these are there: address by name."""

    async def go_away(self) -> None: ...

    async def come_back(self) -> None:
        """With the same list as before."""

    def gateway_keys(self) -> dict[str, Any]:
        """Further keys of the gateway's configuration."""
        return {}

    def pool_keys(self) -> dict[str, Any]:
        """Further keys of each pool's configuration."""
        return {}

    def take_off(self, pool: Child, left: dict[str, str]) -> None:
        """The pool is not to get anything new from now on; the others are these."""
        self.list(left)

    def end(self, pool: Child) -> None:
        """It has been off the list for `STAY_S`."""
        pool.signal(signal.SIGTERM)


class FileOfPools(ListedPools):
    def __init__(self, folder: Path) -> None:
        self._path = folder / "targets.yaml"

    def section(self) -> dict[str, Any]:
        return {"source": "file", "path": str(self._path)}

    def list(self, pools: dict[str, str]) -> None:
        beside = self._path.with_suffix(".new")
        beside.write_text(yaml.safe_dump({"targets": [{"name": one, "address": at} for one, at in pools.items()]}))
        os.replace(beside, self._path)

    async def go_away(self) -> None:
        self._path.rename(self._path.with_suffix(".away"))

    async def come_back(self) -> None:
        self._path.with_suffix(".away").rename(self._path)


class NamedPools(ListedPools):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def section(self) -> dict[str, Any]:
        return {"source": "dns", "name": NAME, "server": self._server.address}

    def list(self, pools: dict[str, str]) -> None:
        self._server.fault = ""
        services = [f"0 0 {at.rpartition(':')[2]} {one}.test." for one, at in pools.items()]
        hosts = {(f"{one}.test.", "A"): ["127.0.0.1"] for one in pools}
        self._server.records = {(f"{NAME}.", "SRV"): services, **hosts}

    async def go_away(self) -> None:
        self._server.fault = "servfail"

    async def come_back(self) -> None:
        self._server.fault = ""


class PodsOfAService(ListedPools):
    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._ports: dict[str, int] = {}

    def section(self) -> dict[str, Any]:
        return {"source": "kubernetes", "service": "pools", "namespace": "prod", "server": self._api.url}

    def list(self, pools: dict[str, str]) -> None:
        ports = {name: int(at.rpartition(":")[2]) for name, at in pools.items()}
        for name, port in ports.items():
            if self._ports.get(name) != port:
                self._api.put(slice_of(name, port, endpoint(name, "127.0.0.1")))
        for name in self._ports.keys() - ports.keys():
            ends = endpoint(name, "127.0.0.1", ready=False, terminating=True)
            self._api.put(slice_of(name, self._ports[name], ends))
        self._ports = ports

    async def go_away(self) -> None:
        await self._api.stop()

    async def come_back(self) -> None:
        await self._api.start()


class PoolsThatAnnounce(ListedPools):
    def __init__(self, broker: Mosquitto) -> None:
        self._broker = broker

    def section(self) -> dict[str, Any]:
        return {"source": "announce"}

    def list(self, pools: dict[str, str]) -> None:
        pass  # they say it themselves

    def gateway_keys(self) -> dict[str, Any]:
        return {"mqtt": self._broker.url}

    def pool_keys(self) -> dict[str, Any]:
        return {"mqtt": self._broker.url, "drain_s": STAY_S}

    def take_off(self, pool: Child, left: dict[str, str]) -> None:
        pool.signal(signal.SIGTERM)

    def end(self, pool: Child) -> None:
        pass  # it does so by itself

    async def go_away(self) -> None:
        self._broker.kill()

    async def come_back(self) -> None:
        await asyncio.to_thread(self._broker.start)


@dataclass
class SteadyCalls:
    """Callers that come at a fixed rate, whatever the answers."""

    session: aiohttp.ClientSession
    url: str
    sent_at: dict[str, list[float]] = field(default_factory=dict)  # by target: of the requests that it answered
    answers: int = 0
    failed: list[str] = field(default_factory=list)
    under_way: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        due_at = clock.now()
        while True:
            task = asyncio.create_task(self._call(), name="a call")
            self.under_way.add(task)
            task.add_done_callback(self.under_way.discard)
            due_at += 1 / RATE
            await clock.sleep(max(0.0, due_at - clock.now()))

    async def _call(self) -> None:
        sent_at = clock.now()
        try:
            async with self.session.post(self.url, data=BODY) as response:
                await response.read()
                if response.status != 200:
                    self.failed.append(f"{response.status}: {(await response.text())[:300]}")
                    return
                self.answers += 1
                self.sent_at.setdefault(response.headers["tidegate-served-by"], []).append(sent_at)
        except aiohttp.ClientError as error:
            self.failed.append(str(error))


async def start_pool(stack: AsyncExitStack, folder: Path, name: str, keys: dict[str, Any]) -> Child:
    config = folder / f"{name}.yaml"
    words = {"name": name, "grpc_port": 0, "model_repository": str(folder / "models"), "device": "cpu"}
    config.write_text(yaml.safe_dump({**words, "log_level": "error", **keys}))
    child = Child(name, "-m", "cloud_pool", "--config", str(config), log=folder / f"{name}.log")
    await stack.enter_async_context(child)
    while child.ready["event"] != "ready":
        child.ready = await child.line()
    return child


async def start_gateway(stack: AsyncExitStack, folder: Path, source: ListedPools) -> Child:
    config = folder / "gateway.yaml"
    ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
    words = {"model_repository": str(folder / "models"), "discovery": [source.section()], "log_level": "info"}
    config.write_text(yaml.safe_dump({**ports, **words, **source.gateway_keys()}))
    child = Child("gateway", "-m", "gateway", "--config", str(config), log=folder / "gateway.log")
    await stack.enter_async_context(child)
    while child.ready["event"] != "ready":
        child.ready = await child.line()
    return child


async def ready_targets(session: aiohttp.ClientSession, admin: str) -> list[str]:
    async with session.get(f"{admin}/v1/state") as response:
        return sorted(one["id"] for one in (await response.json())["targets"] if one["state"] == "ready")


async def all_ready(session: aiohttp.ClientSession, admin: str, names: Collection[str]) -> None:
    """Wait until the gateway has reached those that were there before it: what is measured is what comes and goes."""
    async with asyncio.timeout(30.0):
        while not {f"pool/{name}" for name in names} <= set(await ready_targets(session, admin)):
            await clock.sleep(0.05)


async def measure(source: ListedPools, folder: Path, repeats: int, away_s: float) -> dict[str, Any]:
    """The seconds of each repeat, and what became of the requests."""
    async with AsyncExitStack() as stack:
        costs = PacedCosts(pool_ms=((workload.TOKENS, POOL_MS), (ROWS * workload.TOKENS, ROWS * POOL_MS)))
        add_paced(workload.MODEL, costs, folder / "models", noise=PacedNoise(pool=0.0))
        stays = {}
        for name in ("stays-0", "stays-1"):
            stays[name] = (await start_pool(stack, folder, name, source.pool_keys())).ready["addresses"]["grpc"]
        source.list(stays)
        gateway = await start_gateway(stack, folder, source)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        admin = gateway.ready["addresses"]["admin"]
        await all_ready(session, admin, stays)
        calls = SteadyCalls(session, gateway.ready["addresses"]["http"] + PATH)
        callers = await stack.enter_async_context(OwnedTask(calls.run, name="calls"))
        await clock.sleep(3.0)
        first_s, last_s = [], []
        for repeat in range(repeats):
            came, went = await come_and_go(source, folder, stays, f"comes-{repeat}", calls)
            first_s.append(came)
            last_s.append(went)
            print(f"  listed → first request {came:.2f} s, off the list → last new request {went:.2f} s", flush=True)
        await source.go_away()
        least = await fewest_ready(session, admin, away_s)
        await source.come_back()
        least = min(least, await fewest_ready(session, admin, BACK_S))
        await callers.aclose()
        async with asyncio.timeout(30.0):
            await asyncio.gather(*calls.under_way)
        for words in calls.failed[:5]:
            print(f"  failed: {words}", file=sys.stderr)
        return {
            "first_s": Spread.of(first_s),
            "last_s": Spread.of(last_s),
            "first_most_s": max(first_s),
            "last_most_s": max(last_s),
            "lost": len(stays) - least,
            "answers": calls.answers,
            "failed": len(calls.failed),
        }


async def come_and_go(
    source: ListedPools, folder: Path, stays: dict[str, str], name: str, calls: SteadyCalls
) -> tuple[float, float]:
    """(from being listed to the first request there, from being taken off to the last one), in seconds."""
    target = f"pool/{name}"
    async with AsyncExitStack() as stack:
        pool = await start_pool(stack, folder, name, source.pool_keys())
        listed_at = clock.now()
        source.list({**stays, name: pool.ready["addresses"]["grpc"]})
        async with asyncio.timeout(60.0):
            while target not in calls.sent_at:
                await clock.sleep(0.01)
        first_at = calls.sent_at[target][0]
        await clock.sleep(3.0)
        off_at = clock.now()
        source.take_off(pool, stays)
        await clock.sleep(STAY_S)
        last_at = max(calls.sent_at[target])
        source.end(pool)
    await clock.sleep(1.0)
    assert max(calls.sent_at[target]) <= last_at, "it got requests after it was ended"
    return max(0.0, first_at - listed_at), max(0.0, last_at - off_at)


async def fewest_ready(session: aiohttp.ClientSession, admin: str, seconds: float) -> int:
    """The least number of targets that were ready at once in that time."""
    until, least = clock.now() + seconds, sys.maxsize
    while clock.now() < until:
        least = min(least, len(await ready_targets(session, admin)))
        await clock.sleep(0.5)
    return least


async def source_of(name: str, stack: AsyncExitStack, folder: Path) -> ListedPools:
    match name:
        case "file":
            return FileOfPools(folder)
        case "dns":
            return NamedPools(await stack.enter_async_context(DnsServer()))
        case "kubernetes":
            return PodsOfAService(await stack.enter_async_context(ClusterApi()))
    return PoolsThatAnnounce(stack.enter_context(Mosquitto(folder)))


async def bench(repeats: int, away_s: float) -> Report:
    report = Report("discovery", {"repeats": repeats, "away_s": away_s, "rate": RATE, "pool_ms": POOL_MS})
    rows = []
    async with AsyncExitStack() as stack:
        for name in ("file", "dns", "kubernetes", "announce"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
            source = await source_of(name, stack, folder)
            print(name, flush=True)
            found = report.figures[name] = await measure(source, folder, repeats, away_s)
            rows.append((name, *(f"{found[one]:.2f}" for one in ("first_most_s", "last_most_s")), found["failed"]))
            report.goal(Goal(f"{name}_ready_to_first_request_s", found["first_most_s"], 2.0, "<="))
            report.goal(Goal(f"{name}_terminating_to_last_new_request_s", found["last_most_s"], 1.0, "<="))
            report.goal(Goal(f"{name}_targets_lost_while_the_source_was_away", found["lost"], 0, "<="))
            report.goal(Goal(f"{name}_failed_requests", found["failed"], 0, "<="))
    table(("source", "listed → first, most s", "off → last new, most s", "failed"), rows)
    return report


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    repeats = chosen.repeats or (1 if chosen.quick else 5)
    asyncio.run(bench(repeats, chosen.seconds or (5.0 if chosen.quick else 60.0))).write()


if __name__ == "__main__":
    main()

"""Four gateways beside one: answers in time, one tenant's quota over all, and what happens when broker or gateway dies.

    callers (this process) ──HTTP──▶ 4 gateways ──link──▶ 4 pools (`engine: paced`)     quotas by way of a Mosquitto

In turn within each repeat the same load comes to one of the gateways and to all four at random. The quota: callers of
one tenant ask twice what it may have, ten of eleven of them at one gateway. Then the broker is killed, and everything
comes to four gateways that hear nothing of each other; then, with a broker again, one of the gateways.

With `--store` four gateways lease the quota from a redis-server instead. That is killed; and then, with a store again,
the gateway that conducts rollouts is, as often as there is another one (results in `gateways_store`).

    python -m tests.bench.gateways [--quick] [--repeats N] [--seconds EACH] [--store]
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from gateway.delivery.rollouts.conductor_lease import LEASE_S
from tests.bench import workload
from tests.bench.discovery import BODY, PATH, start_pool
from tests.bench.harness import Child, Goal, Report, Spread, parser, ratios, table
from tests.support.mqtt.brokers import MOSQUITTO, Mosquitto
from tests.support.stores import REDIS, RedisServer
from tidegate import clock
from tidegate.tools.build.demo.paced import PacedCosts, PacedNoise, add_paced

GATEWAYS: Final = 4
POOLS: Final = 4
POOL_MS: Final = 20.0  # a request takes, also in a batch
LOAD: Final = 0.6  # of what the pools can do
BUDGET_MS: Final = 150
QUOTA: Final = 40.0  # requests a second
SKEW: Final = (10, 1, 1, 1)
SETTLES_S: Final = 3.0
PATIENT_MS: Final = 20_000  # where only the quota is meant to refuse


@dataclass
class Told:
    """What became of the requests of one stretch."""

    statuses: Counter[int] = field(default_factory=Counter)
    in_time: int = 0
    sent_for_s: float = 0.0  # longer than was meant where this process had no core
    broken: list[str] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        return self.in_time / max(1, sum(self.statuses.values()) + len(self.broken))


async def callers(
    session: aiohttp.ClientSession,
    urls: list[str],
    weights: tuple[int, ...],
    rate: float,
    seconds: float,
    tenant: str,
    budget_ms: int = BUDGET_MS,
) -> Told:
    """Requests at random instants to gateways at random, whatever becomes of those before them."""
    told, draw = Told(), random.Random(7)
    headers = {"tidegate-budget-ms": str(budget_ms), **({"tidegate-tenant": tenant} if tenant else {})}

    async def one(url: str) -> None:
        sent_at = clock.now()
        try:
            async with session.post(url + PATH, data=BODY, headers=headers) as response:
                await response.read()
                told.statuses[response.status] += 1
                told.in_time += response.status == 200 and clock.now() - sent_at <= budget_ms / 1e3
        except aiohttp.ClientError as error:
            told.broken.append(str(error))

    due_at = began_at = clock.now()
    until = began_at + seconds
    async with asyncio.TaskGroup() as tasks:
        while due_at < until:
            due_at += draw.expovariate(rate)
            await clock.sleep(max(0.0, due_at - clock.now()))
            tasks.create_task(one(draw.choices(urls, weights)[0]))
        told.sent_for_s = clock.now() - began_at
    return told


async def start_gateway(
    stack: AsyncExitStack,
    folder: Path,
    name: str,
    broker: str,
    pools: dict[str, str],
    more: dict[str, Any] | None = None,
) -> Child:
    config = folder / f"{name}.yaml"
    ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
    words: dict[str, Any] = {
        "name": name, "model_repository": str(folder / "models"), "mqtt": broker, "log_level": "info",
        "targets": [{"name": one, "address": at} for one, at in pools.items()],
        "tenants": {"acme": {"requests_per_s": QUOTA}}, **(more or {}),
    }  # fmt: skip
    config.write_text(yaml.safe_dump({**ports, **words}))
    child = Child(name, "-m", "gateway", "--config", str(config), log=folder / f"{name}.log")
    await stack.enter_async_context(child)
    while child.ready["event"] != "ready":
        child.ready = await child.line()
    return child


async def seen(session: aiohttp.ClientSession, gateways: list[Child], count: int) -> None:
    """Wait until each of these gateways counts so many."""
    async with asyncio.timeout(60.0):
        for one in gateways:
            while True:
                async with session.get(one.ready["addresses"]["admin"] + "/v1/state") as response:
                    if (await response.json())["gateways"]["count"] == count:
                        break
                await clock.sleep(0.1)


async def granted(
    session: aiohttp.ClientSession, urls: list[str], for_s: float, settles_s: float, budget_ms: int = BUDGET_MS
) -> tuple[float, Told]:
    """(what was granted over the quota, what became of the requests), once the shares have settled."""
    weights = SKEW[: len(urls)]
    if settles_s:
        await callers(session, urls, weights, 2 * QUOTA, settles_s, "acme", budget_ms)
    told = await callers(session, urls, weights, 2 * QUOTA, for_s, "acme", budget_ms)
    return told.statuses[200] / (QUOTA * told.sent_for_s), told


async def conductor(session: aiohttp.ClientSession, gateway: Child) -> str:
    """Which gateway conducts rollouts, as this one knows it."""
    async with session.get(gateway.ready["addresses"]["admin"] + "/v1/rollouts") as response:
        return str((await response.json())["conductor"])


async def bench_with_a_store(repeats: int) -> Report:
    """Quotas by leases, with the store and after it was killed; how long rollouts are without a conductor."""
    report = Report("gateways_store", {"repeats": repeats, "quota": QUOTA, "skew": SKEW, "lease_s": LEASE_S})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        add_paced(workload.MODEL, PacedCosts(pool_ms=((workload.TOKENS, POOL_MS),)), folder / "models")
        broker, store = stack.enter_context(Mosquitto(folder)), stack.enter_context(RedisServer(folder))
        pools = {"p0": (await start_pool(stack, folder, "p0", {})).ready["addresses"]["grpc"]}
        gateways = []
        for name in (f"g{one}" for one in range(GATEWAYS)):
            files = {"folder": str(folder / f"{name}-files"), "port": 0}
            more = {"store": {"url": store.url}, "artifacts": files}
            gateways.append(await start_gateway(stack, folder, name, broker.url, pools, more))
        urls = [one.ready["addresses"]["http"] for one in gateways]
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        await seen(session, gateways, GATEWAYS)
        kept = [(await granted(session, urls, 10.0, SETTLES_S, PATIENT_MS))[0] for _ in range(repeats)]
        store.kill()
        killed, told = await granted(session, urls, 10.0, 0.0, PATIENT_MS)
        failed = len(told.broken) + sum(count for status, count in told.statuses.items() if status not in (200, 429))
        store.start()
        away_s = []
        for _ in range(GATEWAYS - 1):
            await clock.sleep(LEASE_S + SETTLES_S)  # all of them have heard who conducts
            name = await conductor(session, gateways[0])
            gone = next(one for one in gateways if one.name == name)
            gateways.remove(gone)
            gone.signal(signal.SIGKILL)
            killed_at = clock.now()
            while await conductor(session, gateways[0]) == name:
                await clock.sleep(0.05)
            away_s.append(clock.now() - killed_at)
    report.figures |= {
        "quota": Spread.of(kept), "quota_store_killed": killed, "failed_store_killed": failed,
        "rollout_takeover_s": Spread.of(away_s),
    }  # fmt: skip
    table(
        ("", "figure"),
        [
            ("granted over the quota, by leases, 10 : 1", f"{report.figures['quota']:.3f}"),
            ("... from the moment in which the store is killed", f"{killed:.3f}"),
            ("seconds from the conductor's kill to the next one", f"{report.figures['rollout_takeover_s']:.1f}"),
        ],
    )
    report.goal(Goal("gateways_quota_error_leased", max(abs(one - 1.0) for one in kept), 0.05, "<="))
    report.goal(Goal("gateways_quota_store_killed", killed, 1.2, "<="))
    report.goal(Goal("gateways_failed_store_killed", failed, 0, "<="))
    report.goal(Goal("gateways_rollout_takeover_s", max(away_s), 10.0, "<="))
    return report


async def bench(repeats: int, seconds: float) -> Report:
    report = Report("gateways", {"repeats": repeats, "seconds": seconds, "load": LOAD, "quota": QUOTA, "skew": SKEW})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        rows = 32 * workload.TOKENS
        costs = PacedCosts(pool_ms=((workload.TOKENS, POOL_MS), (rows, 32 * POOL_MS)))
        add_paced(workload.MODEL, costs, folder / "models", noise=PacedNoise(pool=0.2))
        broker = stack.enter_context(Mosquitto(folder))
        pools = {}
        for number in range(POOLS):
            pools[f"p{number}"] = (await start_pool(stack, folder, f"p{number}", {})).ready["addresses"]["grpc"]
        gateways = [await start_gateway(stack, folder, f"g{one}", broker.url, pools) for one in range(GATEWAYS)]
        urls = [one.ready["addresses"]["http"] for one in gateways]
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        await seen(session, gateways, GATEWAYS)
        rate = LOAD * POOLS * 1e3 / POOL_MS
        for url in urls:  # each learns the way to each pool
            await callers(session, [url], (1,), rate / 2, 2.0, "")
        ones, fours = [], []
        for repeat in range(repeats):
            ones.append((await callers(session, urls[:1], (1,), rate, seconds, "")).attainment)
            fours.append((await callers(session, urls, (1,) * GATEWAYS, rate, seconds, "")).attainment)
            print(f"  {repeat + 1}: one gateway {ones[-1]:.4f}, four {fours[-1]:.4f} in time", flush=True)
        over = ratios(fours, ones)
        report.figures |= {"one": Spread.of(ones), "four": Spread.of(fours), "four_over_one": over}

        kept = [(await granted(session, urls, 10.0, SETTLES_S))[0] for _ in range(repeats)]
        broker.kill()
        without_broker, _ = await granted(session, urls, 10.0, SETTLES_S)
        broker.start()
        await seen(session, gateways, GATEWAYS)
        gateways[-1].signal(signal.SIGKILL)
        await seen(session, gateways[:-1], GATEWAYS - 1)
        after_kill, told = await granted(session, urls[:-1], 10.0, SETTLES_S)
        failed = len(told.broken) + sum(count for status, count in told.statuses.items() if status not in (200, 429))
        report.figures |= {
            "quota": Spread.of(kept), "quota_without_broker": without_broker, "quota_after_kill": after_kill,
            "failed_after_kill": failed,
        }  # fmt: skip
    table(
        ("", "figure"),
        [
            ("in time, one gateway", f"{report.figures['one']:.4f}"),
            ("in time, four", f"{report.figures['four']:.4f}"),
            ("granted over the quota, four gateways, 10 : 1", f"{report.figures['quota']:.3f}"),
            ("... the broker killed", f"{without_broker:.3f}"),
            ("... one gateway killed", f"{after_kill:.3f}"),
        ],
    )
    report.goal(Goal("gateways_attainment_of_4_over_one", over.median, 0.98))
    report.goal(Goal("gateways_quota_error_skewed_10_to_1", max(abs(one - 1.0) for one in kept), 0.05, "<="))
    report.goal(Goal("gateways_quota_without_broker", without_broker, 1.2, "<="))
    report.goal(Goal("gateways_quota_error_after_a_kill", abs(after_kill - 1.0), 0.05, "<="))
    report.goal(Goal("gateways_failed_after_a_kill", failed, 0, "<="))
    return report


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--store", action="store_true", help="with a store, and without the comparison to one gateway")
    chosen = options.parse_args()
    assert MOSQUITTO is not None, "needs mosquitto: make tools"
    repeats = chosen.repeats or (1 if chosen.quick else 5)
    if chosen.store:
        assert REDIS is not None, "needs redis-server: make tools"
        asyncio.run(bench_with_a_store(repeats)).write()
    else:
        asyncio.run(bench(repeats, chosen.seconds or (5.0 if chosen.quick else 10.0))).write()


if __name__ == "__main__":
    main()

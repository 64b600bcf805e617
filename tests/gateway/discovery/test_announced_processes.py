"""Pools as processes, a real Mosquitto, and what ends pools: SIGKILL, SIGTERM, a start elsewhere."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml

from gateway.app import Gateway
from gateway.config.discovery import SourceConfig
from gateway.config.gateway import GatewayConfig
from tests.bench import workload
from tests.bench.harness import Child
from tests.support.gateway.app import gateway_for, until
from tests.support.mqtt.brokers import Mosquitto
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytestmark = pytest.mark.slow

BODY = {
    "inputs": [
        {"name": name, "datatype": "INT64", "shape": [1, workload.TOKENS], "data": [1] * workload.TOKENS}
        for name in ("input_ids", "attention_mask")
    ]
}


@dataclass
class Site:
    folder: Path
    broker: Mosquitto
    gateway: Gateway
    session: aiohttp.ClientSession
    stack: AsyncExitStack

    async def start_pool(self, name: str) -> Child:
        """Returns once it says that it is ready."""
        config = self.folder / f"{name}.yaml"
        words = {"name": name, "grpc_port": 0, "model_repository": str(self.folder / "models"), "device": "cpu"}
        config.write_text(yaml.safe_dump({**words, "mqtt": self.broker.url, "log_level": "error"}))
        pool = Child(name, "-m", "cloud_pool", "--config", str(config), log=self.folder / f"{name}.log")
        await self.stack.enter_async_context(pool)
        while pool.ready["event"] != "ready":
            pool.ready = await pool.line()
        return pool

    async def asked(self) -> tuple[int, str]:
        url = f"{self.gateway.addresses['http']}/v2/models/{workload.MODEL}/infer"
        async with self.session.post(url, json=BODY) as response:
            await response.read()
            return response.status, response.headers.get("tidegate-served-by", "")

    def is_up(self, target_id: str) -> bool:
        target = self.gateway.fleet.targets.get(target_id)
        return target is not None and target.up


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    add_paced(workload.MODEL, PacedCosts(pool_ms=((workload.TOKENS, 5.0),)), folder / "models")
    ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
    with Mosquitto(folder) as broker:
        config = GatewayConfig(
            model_repository=folder / "models",
            mqtt=broker.url,
            discovery=(SourceConfig(source="announce"),),
            **ports,  # type: ignore[arg-type]
        )
        async with gateway_for(config) as (gateway, session), AsyncExitStack() as stack:
            yield Site(folder, broker, gateway, session, stack)


async def test_a_killed_pool_that_starts_elsewhere_keeps_its_id_and_its_link(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        pool = await here.start_pool("one")
        await until(lambda: here.is_up("pool/one"))
        assert await here.asked() == (200, "pool/one")
        before = here.gateway.fleet.targets["pool/one"]
        pool.signal(signal.SIGKILL)
        await until(lambda: "pool/one" not in here.gateway.fleet.targets)
        assert (await here.asked())[0] == 503
        await here.start_pool("one")
        await until(lambda: here.is_up("pool/one"))
        after = here.gateway.fleet.targets["pool/one"]
        assert after is not before and after.spec.address != before.spec.address
        assert after.link is before.link  # its costs it has measured anew: a new table is a new start
        assert await here.asked() == (200, "pool/one")
        assert list(here.gateway.found.refusals()) == []


async def test_a_pool_that_is_asked_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        one = await here.start_pool("one")
        await here.start_pool("two")
        await until(lambda: here.is_up("pool/one") and here.is_up("pool/two"))
        one.signal(signal.SIGTERM)
        await until(lambda: here.gateway.found.targets["pool/one"].leaving != "", within_s=5.0)
        for _ in range(5):
            assert await here.asked() == (200, "pool/two")
        await until(lambda: "pool/one" not in here.gateway.fleet.targets)
        async with gateway_for(here.gateway.config.model_copy(update={"name": "second"})) as (
            another,
            _,
        ):  # which knows only what the broker has kept
            await until(lambda: "pool/two" in another.found.targets)
            assert "pool/one" not in another.found.targets


async def test_a_pool_outlives_its_broker(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        await here.start_pool("one")
        await until(lambda: here.is_up("pool/one"))
        here.broker.kill()
        await until(lambda: here.gateway.found.sources["announce"].why != "")
        assert await here.asked() == (200, "pool/one")
        here.broker.start()
        await until(lambda: here.gateway.found.sources["announce"].why == "")
        assert await here.asked() == (200, "pool/one")
        assert here.is_up("pool/one") and here.gateway.found.targets["pool/one"].leaving == ""

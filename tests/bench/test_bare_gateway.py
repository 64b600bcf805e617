"""The gateway without observers, against which the cost of observing is measured, serves, and keeps no record."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.bench.harness import Child
from tests.support.gateway.app import BODY, INFER, Far, repository, running
from tidegate import clock

pytestmark = pytest.mark.slow


async def ask(session: aiohttp.ClientSession, address: str) -> int:
    async with session.post(address + INFER, json=BODY) as response:
        return response.status


@pytest.mark.parametrize(("module", "observed"), [("gateway", True), ("tests.bench.bare_gateway", False)])
async def test_a_bare_gateway_answers_and_neither_counts_nor_remembers(
    tmp_path: Path, module: str, observed: bool
) -> None:
    far, config = Far("pool/a"), tmp_path / "gateway.yaml"
    async with running(far), aiohttp.ClientSession() as session:
        targets = [{"name": "a", "tier": "pool", "address": far.address}]
        words = {"name": "main", "http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0, "targets": targets}
        config.write_text(yaml.safe_dump({**words, "model_repository": str(repository(tmp_path)), "console": False}))
        async with Child(module, "-m", module, "--config", str(config), log=tmp_path / "log") as child:
            at = child.ready["addresses"]

            async def read(port: str, path: str) -> str:
                async with session.get(at[port] + path) as response:
                    return await response.text()

            async with asyncio.timeout(30.0):
                while await ask(session, at["http"]) != 200:
                    await clock.sleep(0.02)
            assert ('outcome="ok"' in await read("metrics", "/metrics")) is observed
            assert ("pool/a" in await read("admin", "/debug/decisions?last=20")) is observed

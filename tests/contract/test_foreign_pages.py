"""Every HTTP port of a gateway, an edge and a pool refuses what a browser sends for a page of a foreign web site."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from tests.cloud_pool.workers_support import text_repository
from tests.support.gateway.app import configured
from tests.support.models.tiny_models import tiny_repository
from tidegate.config import load

pytestmark = pytest.mark.slow
PATHS = {"metrics": "/metrics", "artifacts": "/healthz", "admin": "/healthz"}
FOREIGN = ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"})
REBOUND = {"Origin": "http://evil.example:1", "Host": "evil.example:1"}  # a name that turned into this address


async def refuses_foreign_pages(addresses: Mapping[str, str]) -> None:
    async with aiohttp.ClientSession() as session:
        for name, address in addresses.items():
            url = f"{address if '://' in address else f'http://{address}'}{PATHS.get(name, '/v2/health/live')}"
            async with session.get(url) as answer:
                assert answer.status == 200, f"{name}: a program is answered"
            for headers in (*FOREIGN, REBOUND):
                async with session.get(url, headers=headers) as answer:
                    assert answer.status == 403, (name, headers)


async def test_a_gateways_ports_answer_no_foreign_page(tmp_path: Path) -> None:
    section = {"folder": tmp_path / "store", "port": 0}
    config = configured(tmp_path, name="main", artifacts=section, mqtt="mqtt://127.0.0.1:9")
    async with Gateway(config) as gateway:
        ports = {name: url for name, url in gateway.addresses.items() if name not in ("grpc", "link")}
        assert ports.keys() >= {"http", "metrics", "admin", "artifacts"}
        await refuses_foreign_pages(ports)


async def test_an_edges_ports_answer_no_foreign_page(tmp_path: Path) -> None:
    models = tiny_repository(tmp_path / "models")
    config = load(
        EdgeConfig, name="kiosk-1", grpc_port=0, http_port=0, metrics_port=0, model_repository=models,
        state_dir=tmp_path / "state", warmup_budget_s=0.5,
    )  # fmt: skip
    async with EdgeApp(config) as app:
        ports = {name: url for name, url in app.addresses.items() if name != "grpc"}
        assert ports.keys() == {"http", "metrics"}
        await refuses_foreign_pages(ports)


async def test_a_pools_port_for_metrics_answers_no_foreign_page(tmp_path: Path) -> None:
    models = text_repository(tmp_path / "models")
    config = load(
        PoolConfig, grpc_port=0, metrics_port=0, model_repository=models, models=("text",), warmup_budget_s=0.5
    )
    async with PoolApp(config) as app:
        await refuses_foreign_pages({"metrics": app.metrics_address})

"""A device on its own and on its way back: a real broker, real ONNX workers, a gateway in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from gateway.config import GatewayConfig
from tests.support.brokers import Mosquitto
from tests.support.unsure_model import SURE, UNSURE, better_repository, kinds_repository
from tidegate import clock
from tidegate.config import load

pytestmark = [pytest.mark.slow, pytest.mark.needs_mosquitto]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path) as one:
        yield one


def edge(models: Path, mqtt: str | None, state: Path, **keys: Any) -> EdgeApp:
    where = {"grpc_port": 0, "http_port": 0, "model_repository": models, "state_dir": state, "mqtt": mqtt}
    keys = {"name": "kiosk", "warmup_budget_s": 0.5, "fleet": "f1", **keys}
    return EdgeApp(load(EdgeConfig, **(where | keys)), draw=lambda: 0.1)


@asynccontextmanager
async def gateway(models: Path, mqtt: str, folder: Path, **keys: Any) -> AsyncIterator[Gateway]:
    ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
    where = {"model_repository": models, "mqtt": mqtt, "fleet": "f1", "ingest": {"path": folder / "ingest.db"}}
    async with Gateway(load(GatewayConfig, **(ports | where | keys)), draw=lambda: 0.1) as one:
        yield one


async def eventually(what: Callable[[], Any], within_s: float = 30.0) -> Any:
    async with asyncio.timeout(within_s):
        while True:
            found = what()
            found = await found if asyncio.iscoroutine(found) else found
            if found:
                return found
            await clock.sleep(0.02)


def body(x: list[list[float]], **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(x), 8], "data": x}
    return {"id": "r-1", "inputs": [tensor], **({"parameters": parameters} if parameters else {})}


async def ask(session: aiohttp.ClientSession, address: str, x: list[list[float]], **headers: str) -> Any:
    async with session.post(f"{address}/v2/models/kinds/infer", json=body(x), headers=headers) as answer:
        return answer.status, dict(answer.headers), await answer.json()


async def get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as answer:
        return answer.status, dict(answer.headers), await answer.json()


async def test_a_deferred_request_is_computed_by_a_better_variant_when_there_is_a_way_and_comes_back_by_its_ticket(
    tmp_path: Path, broker: Mosquitto
) -> None:
    models, better = kinds_repository(tmp_path / "m"), better_repository(tmp_path / "b")
    async with edge(models, broker.url, tmp_path / "state") as app, aiohttp.ClientSession() as session:
        device = app.addresses["http"]
        sure, unsure = await ask(session, device, SURE), await ask(session, device, UNSURE)
        assert sure[0] == 200
        assert (unsure[0], unsure[2]["code"], unsure[2]["state"]) == (202, "deferred", "waiting")
        assert unsure[1]["Location"] == f"/v2/tickets/{unsure[2]['ticket']}"
        where = device + unsure[1]["Location"]
        assert (await get(session, where))[2]["state"] == "waiting"

        async with (
            edge(better, broker.url, tmp_path / "other", name="server"),
            gateway(models, broker.url, tmp_path) as g,
        ):

            async def answered() -> Any:
                found = await get(session, where)
                return found if found[0] != 202 else None

            status, headers, answer = await eventually(answered)
            assert status == 200
            assert headers["tidegate-served-by"] == "edge/server"
            assert np.argmax(answer["outputs"][0]["data"]) == 3
            assert answer["id"] == "r-1"
            _, _, records = await get(session, f"{g.addresses['admin']}/v1/ingested")
            kept = [one for one in records["records"] if one["kind"] == "answer"]
            assert [(one["device"], one["id"], one["variant"]) for one in kept] == [
                ("kiosk", unsure[2]["ticket"], "fp32")
            ]
            async with session.delete(where) as forgotten:
                assert forgotten.status == 200
            assert (await get(session, where))[0] == 404

"""A device and a gateway are one interface: a client that fails over by an address needs no other rule.

Every check runs against both, and what both say is compared: the names of headers and trailers, the forms of bodies,
statuses and codes of refusals. Real ONNX Runtime, the demo's MiniLM, unmodified clients.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from tritonclient.utils import InferenceServerException

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from gateway.config.targets import TargetConfig
from tidegate import clock
from tidegate.config import load
from tidegate.models.repository import Repository

pytestmark = [pytest.mark.slow, pytest.mark.clients]
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [1, 4], "data": [101, 7592, 2088, 102]}
MASK = {"name": "attention_mask", "datatype": "INT64", "shape": [1, 4], "data": [1, 1, 1, 1]}
INFER = "/v2/models/minilm/infer"
ROUTE = re.compile(r"[a-z-]+; variant=int8; attempts=1; hedged=0; fallback=0; degraded=\d; provisional=0")


@dataclass
class Side:
    """One of the two, as a client knows it."""

    name: str
    http: str
    grpc: str


@asynccontextmanager
async def both(models: Path, folder: Path) -> AsyncIterator[tuple[Side, Side]]:
    ports = {"http_port": 0, "grpc_port": 0}
    where = {"model_repository": models, "state_dir": folder, "models": ["minilm"], "warmup_budget_s": 0.5}
    async with EdgeApp(load(EdgeConfig, name="kiosk", **ports, **where)) as app:
        target = TargetConfig(name="kiosk", tier="edge", address=app.addresses["grpc"])
        others = {"metrics_port": 0, "admin_port": 0}
        config = load(GatewayConfig, **ports, **others, model_repository=models, targets=(target,))
        async with Gateway(config) as gateway:
            async with asyncio.timeout(30):
                while not gateway.host.model_ready("minilm"):
                    await clock.sleep(0.02)
            yield (
                Side("gateway", gateway.addresses["http"], gateway.addresses["grpc"]),
                Side("device", app.addresses["http"], app.addresses["grpc"]),
            )


async def test_a_client_fails_over_by_changing_one_address(demo_repository: Repository, tmp_path: Path) -> None:
    async with both(demo_repository.root, tmp_path) as sides, aiohttp.ClientSession() as session:
        for check in (
            oip_over_http,
            refusals_over_http,
            oip_over_grpc,
            refusals_over_grpc,
            embeddings,
            refusals_in_openais_form,
            metadata_and_health,
        ):
            said = [await check(side, session) for side in sides]
            assert said[0] == said[1], check.__name__


async def post(session: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> Any:
    async with session.post(url, json=body, headers=headers) as answer:
        return answer.status, answer.headers, await answer.json(content_type=None)


async def oip_over_http(side: Side, session: aiohttp.ClientSession) -> Any:
    status, headers, body = await post(
        session, side.http + INFER, {"id": "7", "inputs": [IDS, MASK]}, **{"tidegate-budget-ms": "20000"}
    )
    assert status == 200
    assert headers["tidegate-served-by"] == "edge/kiosk"
    assert ROUTE.fullmatch(headers["tidegate-route"]), headers["tidegate-route"]
    assert 0 < float(headers["tidegate-budget-left-ms"]) < 20_000
    stages = {entry.partition(";")[0].strip() for entry in headers["server-timing"].split(",")}
    assert {"admit", "queue", "compute"} <= stages
    ours = sorted(name.lower() for name in headers if name.lower().startswith(("tidegate-", "server-timing")))
    return (
        [name for name in ours if name != "tidegate-request-id"],
        sorted(body),
        sorted(name for name in body["parameters"] if name != "tidegate-request-id"),
        body["outputs"][0]["shape"],
    )


async def refusals_over_http(side: Side, session: aiohttp.ClientSession) -> Any:
    """(status, code, whether to try again) of each; words may name the place."""
    found = []
    for path, body, headers in (
        (INFER, {"inputs": [IDS]}, {}),
        (INFER, {"inputs": [{**IDS, "datatype": "FP32"}, MASK]}, {}),
        ("/v2/models/nobody/infer", {"inputs": [IDS, MASK]}, {}),
        (INFER, {"inputs": [IDS, MASK]}, {"tidegate-budget-ms": "soon"}),
        (INFER, {"inputs": [IDS, MASK]}, {"tidegate-budget-ms": "0.001"}),
        (INFER, {"inputs": [IDS, MASK]}, {"tidegate-pin": "moon"}),
        (INFER, {"inputs": [IDS, MASK]}, {"tidegate-defer": "perhaps"}),
        (INFER, {"inputs": [IDS, MASK]}, {"tidegate-variant": "int2"}),
        ("/v2/models/minilm/generate", {}, {}),
        ("/v2/nowhere", {}, {}),
    ):
        status, said, answer = await post(session, side.http + path, body, **headers)
        found.append(
            (path, status, answer["code"], said.get("x-should-retry"), said.get("Content-Type"), sorted(answer))
        )
    return found


async def oip_over_grpc(side: Side, _session: aiohttp.ClientSession) -> Any:
    async with triton_grpc.InferenceServerClient(side.grpc) as client:
        answer = await client.infer("minilm", _inputs(triton_grpc), request_id="7")
        response = answer.get_response()
        named = sorted(name for name in response.parameters if name != "tidegate-request-id")
        assert response.parameters["tidegate-served-by"].string_param == "edge/kiosk"
        return named, response.id, answer.as_numpy(response.outputs[0].name).shape


async def refusals_over_grpc(side: Side, _session: aiohttp.ClientSession) -> Any:
    found = []
    wrong = {"tidegate-pin": "moon"}, {"tidegate-defer": "x"}, {"tidegate-variant": "int2"}
    async with triton_grpc.InferenceServerClient(side.grpc) as client:
        for model, headers in (("nobody", {}), *(("minilm", one) for one in wrong)):
            with pytest.raises(InferenceServerException) as refused:
                await client.infer(model, _inputs(triton_grpc), headers=headers)
            found.append((model, refused.value.status()))
    return found


async def embeddings(side: Side, session: aiohttp.ClientSession) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{side.http}/v1", api_key="none") as client:
        answer = await client.embeddings.create(model="minilm", input=["hello tide", "and gate"])
        models = [model.id async for model in client.models.list()]
    status, headers, body = await post(session, f"{side.http}/v1/embeddings", {"model": "minilm", "input": "hello"})
    assert status == 200
    assert headers["tidegate-served-by"] == "edge/kiosk"
    vectors = [np.round(one.embedding, 3).tolist() for one in answer.data]
    return vectors, answer.usage.total_tokens, models, sorted(body)


async def refusals_in_openais_form(side: Side, session: aiohttp.ClientSession) -> Any:
    found = []
    for body, headers in (
        ({"model": "nobody", "input": "x"}, {}),
        ({"model": "minilm", "input": []}, {}),
        ({"model": "minilm", "input": "x", "dimensions": 3}, {}),
        ({"model": "minilm", "input": "x"}, {"tidegate-defer": "1"}),
        ({"model": "minilm", "input": "x"}, {"x-stainless-read-timeout": "0.000001"}),
    ):
        status, said, answer = await post(session, f"{side.http}/v1/embeddings", body, **headers)
        error = answer["error"]
        found.append((status, error["type"], error["code"], error["param"], said.get("x-should-retry")))
    return found


async def metadata_and_health(side: Side, _session: aiohttp.ClientSession) -> Any:
    async with triton_http.InferenceServerClient(side.http.removeprefix("http://")) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("minilm")
        return await client.get_model_metadata("minilm"), await client.get_model_config("minilm")


def _inputs(library: Any) -> list[Any]:
    return [
        library.InferInput(one["name"], one["shape"], "INT64").set_data_from_numpy(np.array([one["data"]], np.int64))
        for one in (IDS, MASK)
    ]

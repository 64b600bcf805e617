"""A whole gateway over its admin port: state, decisions, metrics, and errors that stop the start."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, target
from tidegate.runtime.process import StartError

pytestmark = pytest.mark.slow


async def test_operators_see_state_decisions_and_metrics(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic", max_batch=1), Far("pool/main")
    async with running(edge, pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(edge), target(pool)))
        )
        await ask(gateway, session)
        admin = gateway.addresses["admin"]

        async with session.get(admin + "/v1/state") as response:
            state = await response.json()
        async with session.get(admin + "/debug/decisions?last=1") as response:
            decisions = (await response.json())["decisions"]
        for question in ("last=x", "skip=x"):
            async with session.get(admin + f"/debug/decisions?{question}") as response:
                assert response.status == 400
        for beyond in (1, 10**30):
            async with session.get(admin + f"/debug/decisions?last=1&skip={beyond}") as response:
                assert await response.json() == {"decisions": []}
        async with session.get(admin + "/healthz") as response:
            assert response.status == 200
        async with session.get(gateway.addresses["metrics"] + "/metrics") as response:
            metrics = await response.text()

        assert [(one["id"], one["state"]) for one in state["targets"]] == [
            ("edge/attic", "ready"),
            ("pool/main", "ready"),
        ]
        assert state["models"] == [
            {"name": "echo", "version": "3", "ready": True, "targets": ["edge/attic", "pool/main"]}
        ]
        assert decisions[0]["chosen"] == decisions[0]["end"]["served_by"] == "pool/main"  # three rows are too many
        assert [one["target"] for one in decisions[0]["candidates"]] == ["pool/main"]
        assert 'tidegate_requests_total{model="echo",outcome="ok",protocol="oip-http",tier="pool"} 1.0' in metrics
        assert 'nv_inference_request_success{model="echo",version="3"} 1.0' in metrics
        assert 'tidegate_breaker_state{target="edge/attic"} 0.0' in metrics


async def test_each_policy_explains_itself_with_the_numbers_that_it_has(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main")
    async with running(edge, pool):
        shown = {}
        for policy in ("cheapest", "value"):
            folder = tmp_path / policy
            folder.mkdir()
            async with AsyncExitStack() as stack:
                gateway, session = await stack.enter_async_context(
                    gateway_for(configured(folder, target(edge), target(pool), policy=policy))
                )
                await ask(gateway, session)
                async with session.get(gateway.addresses["admin"] + "/debug/decisions") as response:
                    (decision,) = (await response.json())["decisions"]
            assert decision["end"]["reason"] == "cheapest"
            shown[policy] = {one["target"]: one for one in decision["candidates"]}

    assert shown["cheapest"]["edge/attic"]["chance"] > 0.99
    assert "value" not in shown["cheapest"]["edge/attic"]
    assert shown["value"]["edge/attic"]["calibrated"] > 0.99
    assert shown["value"]["edge/attic"]["harm"] == 0.0
    assert 0.9 < shown["value"]["edge/attic"]["value"] <= 1.0
    assert shown["value"]["pool/main"]["chance"] > 0.99, "not judged: it could not have won"


async def test_a_taken_port_names_the_key(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for key in ("http_port", "grpc_port"):
            ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0, key: port}
            with pytest.raises(StartError, match=f"127.0.0.1:{port} \\(key '{key}'\\): port {port} is taken"):
                async with Gateway(GatewayConfig(**ports)):  # type: ignore[arg-type]
                    pass

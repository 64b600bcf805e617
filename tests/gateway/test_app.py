"""A whole gateway in this process, with targets on real loopback connections: what a caller sees."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from gateway.config.gateway import GatewayConfig
from tests.support.gateway.app import TRIALS, Far, ask, configured, gateway_for, running, target, until
from tests.support.gateway.targets import AT_ONCE_S, GROWING_S
from tests.support.serving.hosts import echo_request
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.oip.grpc.codec import message_from_request
from tidegate.outcome import Overloaded
from tidegate.rpc import oip_pb2

pytestmark = pytest.mark.slow


async def test_an_edge_answers_because_it_is_the_cheapest_and_the_headers_say_so(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic", variant="int8"), Far("pool/main")
    async with running(edge, pool), AsyncExitStack() as stack:
        config = configured(tmp_path, target(edge), target(pool))
        gateway, session = await stack.enter_async_context(gateway_for(config))

        asked_at = clock.now()
        status, body, headers = await ask(gateway, session)
        took_ms = 1e3 * (clock.now() - asked_at)

        assert status == 200
        assert body["outputs"][0]["data"] == [1, 2, 3]
        assert headers["tidegate-served-by"] == "edge/attic"
        assert headers["tidegate-route"].startswith("cheapest; variant=")
        assert 2000 - took_ms < float(headers["tidegate-budget-left-ms"]) < 2000
        assert "compute" in headers["server-timing"]


async def test_a_demanded_variant_is_honoured(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic", variant="int8"), Far("pool/main", variant="fp32")
    async with running(edge, pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(edge), target(pool)))
        )

        status, _, headers = await ask(gateway, session, **{"tidegate-variant": "fp32"})

        assert (status, headers["tidegate-served-by"]) == (200, "pool/main")
        assert headers["tidegate-route"].startswith("demanded; variant=fp32")


async def test_grpc_callers_are_answered_with_the_same_words(tmp_path: Path) -> None:
    pool = Far("pool/main")
    async with running(pool), AsyncExitStack() as stack:
        gateway, _ = await stack.enter_async_context(gateway_for(configured(tmp_path, target(pool))))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(gateway.addresses["grpc"]))

        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
            message_from_request(echo_request(b"abc")).SerializeToString(), timeout=30.0
        )
        answer = oip_pb2.ModelInferResponse.FromString(await call)
        trailers = dict(await call.trailing_metadata())

        assert answer.raw_output_contents[0] == b"abc"
        assert trailers["tidegate-served-by"] == "pool/main"
        assert trailers["tidegate-route"].startswith("only;")


async def test_tensors_that_are_just_allowed_pass_with_their_names_and_what_the_gateway_adds(tmp_path: Path) -> None:
    edge, limit = Far("edge/attic"), 4096
    async with running(edge), AsyncExitStack() as stack:
        config = configured(tmp_path, target(edge), max_body_bytes=limit)
        gateway, _ = await stack.enter_async_context(gateway_for(config))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(gateway.addresses["grpc"]))
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        message = message_from_request(echo_request(bytes(limit))).SerializeToString()
        assert len(message) > limit

        answer = oip_pb2.ModelInferResponse.FromString(await call(message, timeout=30.0))

        assert answer.raw_output_contents[0] == bytes(limit)


async def test_a_target_that_is_full_is_replaced_and_the_fallback_declared(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main")
    edge.host.error = Overloaded("the queue is full", retry_after_s=0.5)
    async with running(edge, pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(edge), target(pool)))
        )

        status, _, headers = await ask(gateway, session)

        assert (status, headers["tidegate-served-by"]) == (200, "pool/main")
        assert (
            headers["tidegate-route"]
            == "fallback; variant=fp32; attempts=2; hedged=0; fallback=1; degraded=0; provisional=0"
        )


async def test_a_silent_target_is_hedged_in_time_and_its_attempt_is_cancelled(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main", says_s=0.3)
    edge.host.gate.clear()
    async with running(edge, pool):
        config = configured(tmp_path, target(edge), target(pool))
        for _ in range(TRIALS):
            async with gateway_for(config) as (gateway, session):
                asked = len(edge.host.calls)
                status, _, headers = await ask(gateway, session, **{"tidegate-budget-ms": "3000"})
                await until(lambda: edge.host.cancelled == asked + 1)  # noqa: B023
                assert gateway.fleet.targets["edge/attic"].queue_estimate.in_flight == 0
            if status == 200:
                break

        assert (status, headers["tidegate-served-by"]) == (200, "pool/main")
        assert headers["tidegate-route"].startswith("hedge; ") and "hedged=1; fallback=0" in headers["tidegate-route"]


async def test_nothing_answers_before_the_deadline_is_504_at_the_deadline(tmp_path: Path) -> None:
    pool = Far("pool/main")
    pool.host.gate.clear()
    async with running(pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(gateway_for(configured(tmp_path, target(pool))))

        for budget_s in GROWING_S:
            started = clock.now()
            status, _, _ = await ask(gateway, session, **{"tidegate-budget-ms": f"{1e3 * budget_s:g}"})
            assert status == 504
            assert budget_s - 0.01 <= clock.now() - started < budget_s + AT_ONCE_S
            if pool.host.calls:
                break
        await until(lambda: pool.host.cancelled >= 1)


async def test_a_killed_target_is_left_alone_at_once_and_used_again_when_it_is_back(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main")
    async with running(edge, pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(edge), target(pool)))
        )
        await edge.kill()
        status, _, headers = await ask(gateway, session)
        assert (status, headers["tidegate-served-by"]) == (200, "pool/main")

        await pool.kill()
        await until(lambda: not gateway.host.ready())
        status, body, _ = await ask(gateway, session)
        assert status == 503
        assert "pool/main is down since" in body["error"]
        assert not gateway.host.model_ready("echo")

        await edge.start()
        await until(gateway.host.ready)
        status, _, headers = await ask(gateway, session)
        assert (status, headers["tidegate-served-by"]) == (200, "edge/attic")


async def test_only_a_target_that_leaves_without_a_word_is_a_warning(tmp_path: Path) -> None:
    orderly, broken = Far("edge/attic"), Far("pool/main")
    async with running(orderly, broken), AsyncExitStack() as stack:
        gateway, _ = await stack.enter_async_context(gateway_for(configured(tmp_path, target(orderly), target(broken))))
        assert orderly.link is not None
        with capture_logs() as logs:
            await orderly.link.drain("shutdown")
            await broken.kill()
            await until(lambda: not any(one.up for one in gateway.fleet.targets.values()))

    down = {line["target"]: line["log_level"] for line in logs if line["event"] == "target is down"}
    assert down == {"edge/attic": "info", "pool/main": "warning"}


async def test_the_work_of_a_caller_that_hangs_up_is_cancelled(tmp_path: Path) -> None:
    pool = Far("pool/main")
    pool.host.gate.clear()
    async with running(pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(gateway_for(configured(tmp_path, target(pool))))

        asking = asyncio.create_task(ask(gateway, session))
        await pool.host.begun.acquire()
        asking.cancel()

        await until(lambda: pool.host.cancelled == 1)
        assert gateway.admission.in_flight == 0


async def test_a_tenant_over_its_limit_gets_429_and_is_told_when_to_come_back_over_http_and_grpc(
    tmp_path: Path,
) -> None:
    pool = Far("pool/main")
    pool.host.gate.clear()
    async with running(pool), AsyncExitStack() as stack:
        config = configured(tmp_path, target(pool), tenants={"acme": {"max_in_flight": 1}})
        gateway, session = await stack.enter_async_context(gateway_for(config))
        acme = {"tidegate-tenant": "acme", "tidegate-budget-ms": "30000"}
        first = asyncio.create_task(ask(gateway, session, **acme))
        await pool.host.begun.acquire()

        status, body, headers = await ask(gateway, session, **acme)
        assert (status, headers["tidegate-refused"]) == (429, "overloaded")
        assert body["error"] == "over-budget: tenant 'acme' has 1 requests in flight, its limit"
        assert 50 <= int(headers["retry-after-ms"]) <= 30_000

        channel = await stack.enter_async_context(grpc.aio.insecure_channel(gateway.addresses["grpc"]))
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        message = message_from_request(echo_request(b"abc"))
        message.parameters["tidegate-tenant"].string_param = "acme"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method(message.SerializeToString(), timeout=30.0)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(refused.value.trailing_metadata())
        assert trailers["tidegate-code"] == "overloaded"
        assert 50 <= int(trailers["retry-after-ms"]) <= 30_000

        status, body, _ = await ask(gateway, session, **{"tidegate-tenant": "no such name!"})
        assert status == 400
        assert "header tidegate-tenant must be 1 to 64 letters" in body["error"]

        pool.host.gate.set()
        assert (await first)[0] == 200
        async with session.get(gateway.addresses["metrics"] + "/metrics") as answer:
            metrics = await answer.text()
        assert 'tidegate_shed_total{reason="over-budget"} 2.0' in metrics
        assert 'tidegate_tenant_in_flight{tenant="acme"} 0.0' in metrics
        assert "tidegate_overloaded 0.0" in metrics


async def test_a_foreign_server_is_described_and_then_served(tmp_path: Path) -> None:
    far = Far("pool/triton")
    async with running(far), AsyncExitStack() as stack:
        foreign = target(far, foreign=True, models=("echo",))
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
        config = GatewayConfig(targets=(foreign,), **ports)  # type: ignore[arg-type]
        gateway, session = await stack.enter_async_context(gateway_for(config))

        status, body, headers = await ask(gateway, session)

        assert (status, headers["tidegate-served-by"]) == (200, "pool/triton")
        assert body["outputs"][0]["data"] == [1, 2, 3]


async def test_a_foreign_server_that_cannot_be_described_at_first_is_asked_again(tmp_path: Path) -> None:
    far = Far("pool/triton")
    told = far.host.manifest

    def busy(name: str, version: str = "") -> Manifest:
        raise Overloaded("still loading")

    far.host.manifest = busy  # type: ignore[method-assign]
    async with running(far), AsyncExitStack() as stack:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
        config = GatewayConfig(targets=(target(far, foreign=True, models=("echo",)),), **ports)  # type: ignore[arg-type]
        gateway, _ = await stack.enter_async_context(gateway_for(config))
        assert not gateway.catalog.manifests

        far.host.manifest = told  # type: ignore[method-assign]

        await until(lambda: bool(gateway.catalog.manifests))


async def test_a_unary_target_of_our_own_offers_what_the_repository_says(tmp_path: Path) -> None:
    far = Far("pool/main")
    async with running(far), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(far, transport="unary")))
        )

        status, _, headers = await ask(gateway, session, **{"tidegate-variant": "fp32"})

        assert (status, headers["tidegate-served-by"]) == (200, "pool/main")
        assert "compute" in headers["server-timing"]

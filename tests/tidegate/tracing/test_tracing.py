"""Traces end to end: a whole gateway, targets of our own, and a real OTLP collector."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from gateway.core.request.machine import MAX_ATTEMPTS
from tests.cloud_pool.workers_support import text, text_repository
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, target
from tests.support.models.talking import talker_repository
from tests.support.models.tiny_models import tiny_repository
from tests.support.observe.otlp import Otlp, attributes, collector
from tests.support.serving.hosts import echo_request
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import load
from tidegate.generate.request import GenerateRequest, infer_request
from tidegate.oip.grpc.codec import message_from_request
from tidegate.outcome import InternalError
from tidegate.rpc import oip_pb2
from tidegate.tracing.config import TracingConfig
from tidegate.tracing.export import SpanExport
from tidegate.tracing.span import Span
from tidegate.types import Call, Datatype, InferRequest

pytestmark = pytest.mark.slow
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture(autouse=True)
def spans_leave_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.tracing.export.EVERY_S", 0.1)


async def eventually(true: Callable[[], Any], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await clock.sleep(0.02)


@asynccontextmanager
async def stack(
    folder: Path, far: Far, ratio: float = 0.0, **more: Any
) -> AsyncIterator[tuple[Otlp, Gateway, aiohttp.ClientSession]]:
    async with collector() as otlp, running(far):
        tracing = TracingConfig(endpoint=otlp.endpoint, ratio=ratio)
        async with gateway_for(configured(folder, target(far), tracing=tracing, **more)) as (gateway, session):
            yield otlp, gateway, session


async def test_a_callers_trace_goes_through_gateway_and_link_and_comes_back(tmp_path: Path) -> None:
    far = Far("pool/main")
    async with stack(tmp_path, far) as (otlp, gateway, session):
        status, body, headers = await ask(gateway, session, traceparent=PARENT, tracestate="vendor=1")
        assert status == 200
        assert headers["traceparent"].split("-")[1] == TRACE_ID
        assert body["parameters"]["traceparent"] == headers["traceparent"], "clients hide headers"
        onward = far.host.calls[-1].headers
        assert onward["tracestate"] == "vendor=1"
        await eventually(lambda: otlp.named("infer echo"))

        (root,) = otlp.named("infer echo")
        (attempt,) = otlp.named("attempt pool/main")
        assert root.trace_id.hex() == TRACE_ID
        assert root.parent_span_id.hex() == PARENT_ID
        assert root.trace_state == "vendor=1"
        assert headers["traceparent"].split("-")[2] == root.span_id.hex()
        assert onward["traceparent"] == f"00-{TRACE_ID}-{attempt.span_id.hex()}-01"
        assert {"admit", "place", "link out", "compute", "link back"} <= {span.name for span in otlp.of(TRACE_ID)}
        assert attributes(root)["tidegate.served_by"] == "pool/main"
        assert otlp.services == {"tidegate-gateway"}


async def test_grpc_callers_bring_and_get_their_traces_as_metadata(tmp_path: Path) -> None:
    async with stack(tmp_path, Far("pool/main")) as (otlp, gateway, _):
        async with grpc.aio.insecure_channel(gateway.addresses["grpc"]) as channel:
            method = "/inference.GRPCInferenceService/ModelInfer"
            infer = channel.unary_unary(
                method, lambda message: message.SerializeToString(), oip_pb2.ModelInferResponse.FromString
            )
            call = infer(message_from_request(echo_request()), metadata=(("traceparent", PARENT),), timeout=10.0)
            await call
            trailers = {one[0]: one[1] for one in await call.trailing_metadata()}
        assert trailers["traceparent"].split("-")[1] == TRACE_ID
        await eventually(lambda: otlp.of(TRACE_ID))


async def test_an_unsampled_request_leaves_spans_only_if_it_fails(tmp_path: Path) -> None:
    far = Far("pool/main")
    async with stack(tmp_path, far) as (otlp, gateway, session):
        for _ in range(5):
            status, _, headers = await ask(gateway, session)
            assert status == 200 and "traceparent" not in headers
        assert far.host.calls[-1].headers == {}, "nothing is said onward of what nobody will tell"
        far.host.error = InternalError("defect")
        status, _, _ = await ask(gateway, session)
        assert status >= 500
        await eventually(lambda: otlp.named("infer echo"))
        (root,) = otlp.named("infer echo")
        assert root.status.code == root.status.STATUS_CODE_ERROR
        assert attributes(root)["tidegate.outcome"] not in ("ok", "late")
        assert 1 <= len([one for one in otlp.spans if one.name.startswith("attempt")]) <= 2 * MAX_ATTEMPTS


async def test_a_refused_request_that_was_never_placed_is_kept_too(tmp_path: Path) -> None:
    far = Far("pool/main")
    async with stack(tmp_path, far) as (otlp, gateway, session):
        await far.kill()
        await eventually(lambda: not any(one.up for one in gateway.fleet.targets.values()))
        status, _, _ = await ask(gateway, session)
        assert status == 503
        await eventually(lambda: otlp.named("infer echo"))


async def test_exemplars_name_kept_traces(tmp_path: Path) -> None:
    async with stack(tmp_path, Far("pool/main")) as (_, gateway, session):
        await ask(gateway, session)
        accept = {"Accept": "application/openmetrics-text;version=1.0.0"}
        url = gateway.addresses["metrics"] + "/metrics"
        async with session.get(url, headers=accept) as response:
            assert "trace_id" not in await response.text()
        await ask(gateway, session, traceparent=PARENT)
        async with session.get(url, headers=accept) as response:
            assert response.headers["Content-Type"].startswith("application/openmetrics-text")
            lines = (await response.text()).splitlines()
        named = [line for line in lines if f'# {{trace_id="{TRACE_ID}"}}' in line]
        assert any(line.startswith("tidegate_request_duration_seconds_bucket") for line in named)
        assert any(line.startswith("tidegate_deadline_slack_seconds_bucket") for line in named)


@pytest.mark.parametrize("dead", [True, False])
async def test_a_collector_that_is_dead_or_sick_costs_its_spans_and_nothing_else(tmp_path: Path, dead: bool) -> None:
    far = Far("pool/main")
    async with collector() as otlp, running(far):
        otlp.status = 500
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}/v1/traces"
            where = nowhere if dead else otlp.endpoint
            tracing = TracingConfig(endpoint=where, ratio=1.0, timeout_s=1.0, max_queued_spans=64)
            with capture_logs() as logs:
                async with gateway_for(configured(tmp_path, target(far), tracing=tracing)) as (gateway, session):
                    for _ in range(30):
                        assert (await ask(gateway, session))[0] == 200
                    await eventually(lambda: [one for one in logs if one["event"] == "the collector takes no spans"])
                    assert (await ask(gateway, session))[0] == 200
                    async with session.get(gateway.addresses["metrics"] + "/metrics") as response:
                        assert 'tidegate_trace_spans_total{result="exported"} 0.0' in await response.text()
            assert len([one for one in logs if one["event"] == "the collector takes no spans"]) == 1


async def test_an_edge_tells_its_own_part_under_the_attempts_span(tmp_path: Path) -> None:
    models = tiny_repository(tmp_path / "models")
    async with collector() as otlp:
        tracing = {"endpoint": otlp.endpoint, "headers": {"x-token": "abc"}}
        keys = {"grpc_port": 0, "http_port": None, "model_repository": models, "models": ["double"]}
        config = load(
            EdgeConfig, name="kiosk-1", state_dir=tmp_path / "s", warmup_budget_s=0.5, tracing=tracing, **keys
        )
        async with EdgeApp(config) as app:
            tensor = array_to_tensor("x", np.ones((1, 3), dtype=np.float32), Datatype.FP32)
            request = InferRequest("double", (tensor,))
            for said in (PARENT, PARENT[:-2] + "00", ""):
                headers = {"traceparent": said} if said else {}
                await app.host.infer(Call(request, "link", clock.now(), headers=headers))
            await eventually(lambda: otlp.named("serve double"))
        (span,) = otlp.named("serve double")
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
        assert attributes(span)["tidegate.compute_s"] > 0
        assert otlp.services == {"tidegate-edge"}
        assert otlp.headers[0]["x-token"] == "abc"


@pytest.mark.parametrize("tier", ["edge", "pool"])
async def test_a_generation_has_a_span_for_its_prompt_and_one_for_its_tokens(tmp_path: Path, tier: str) -> None:
    models = talker_repository(tmp_path / "models", slots=1, step_ms=4.0)
    async with collector() as otlp:
        keys = {"grpc_port": 0, "model_repository": models, "warmup_budget_s": 0.5, "name": "main"}
        keys |= {"tracing": {"endpoint": otlp.endpoint}}
        app: EdgeApp | PoolApp
        if tier == "edge":
            app = EdgeApp(load(EdgeConfig, http_port=None, state_dir=tmp_path / "s", **keys))
        else:
            app = PoolApp(load(PoolConfig, **keys))
        async with app:
            now, request = clock.now(), infer_request("talker", GenerateRequest((5, 6, 7), 25, ignore_stop=True))
            headers = {"traceparent": PARENT}
            calls = [Call(request, "link", now, now + 30.0, headers=headers) for _ in range(2)]
            await asyncio.gather(*(app.host.infer(call) for call in calls))
            await eventually(lambda: len(otlp.named("decode")) == 2)
    served, first = sorted(otlp.named("serve talker"), key=lambda span: -span.end_time_unix_nano)
    for span in (served, first):
        own = [one for one in otlp.spans if one.parent_span_id == span.span_id]
        prefill, decode = sorted(own, key=lambda one: one.start_time_unix_nano)
        assert (prefill.name, decode.name, span.trace_id.hex()) == ("prefill", "decode", TRACE_ID)
        assert span.start_time_unix_nano <= prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano
        assert decode.end_time_unix_nano == span.end_time_unix_nano
        assert decode.end_time_unix_nano - decode.start_time_unix_nano >= 24 * 3e6
        assert attributes(prefill)["tidegate.computed_tokens"] == 3
        said = attributes(span)
        assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 25)
        assert said["gen_ai.response.finish_reasons"] == "length"
        assert 0.05 < attributes(decode)["tidegate.decode_s"] < 30.0
    queued = next(one for one in otlp.named("prefill") if one.parent_span_id == served.span_id)
    assert queued.start_time_unix_nano - served.start_time_unix_nano >= 20e6, "it waited for the slot"


async def test_a_slow_collector_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.tracing.export.PATIENCE_S", 0.5)
    hold = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = TracingConfig(endpoint=f"http://127.0.0.1:{port}/v1/traces", timeout_s=60.0)
    with capture_logs() as logs:
        async with SpanExport(config, "gateway", "main") as export:
            export.add([Span("a", 1, 2, 0, 0.0, 1.0)])
    hold.set()
    server.close()
    assert [one["event"] for one in logs] == ["spans are lost: the collector did not take them in time"]


async def test_a_batch_of_a_pool_is_linked_to_its_sampled_members(tmp_path: Path) -> None:
    async with collector() as otlp:
        keys = {"grpc_port": 0, "model_repository": text_repository(tmp_path / "models"), "models": ["text"]}
        config = load(PoolConfig, name="main", warmup_budget_s=0.5, tracing={"endpoint": otlp.endpoint}, **keys)
        async with PoolApp(config) as app:
            said = [f"00-{number:032x}-{PARENT_ID}-01" for number in range(1, 9)] + [PARENT[:-2] + "00", ""]
            await asyncio.gather(*(app.host.infer(texts(one)) for one in said))
            await eventually(lambda: len(otlp.named("serve text")) == 8 and linked(otlp) == 8)
        served = {(span.trace_id, span.span_id) for span in otlp.named("serve text")}
        batches = otlp.named("batch pool/main")
        links = [(link.trace_id, link.span_id) for batch in batches for link in batch.links]
        assert len(links) == 8 and set(links) == served, "once each, by the span that the pool has of it"
        assert all(span.parent_span_id.hex() == PARENT_ID for span in otlp.named("serve text"))
        assert sum(attributes(batch)["tidegate.requests"] for batch in batches) >= 8
        assert {attributes(batch)["tidegate.closed_by"] for batch in batches} <= {"full", "idle", "shape"}
        assert TRACE_ID not in {span.trace_id.hex() for span in otlp.spans}, "who is not sampled is told of nowhere"


def linked(otlp: Otlp) -> int:
    return sum(len(batch.links) for batch in otlp.named("batch pool/main"))


def texts(traceparent: str) -> Call:
    arrays = text(8)
    tensors = tuple(array_to_tensor(name, array, Datatype.INT64) for name, array in arrays.items())
    headers = {"traceparent": traceparent} if traceparent else {}
    return Call(InferRequest("text", tensors), "link", clock.now(), headers=headers)

"""A gateway as a process that is told to stop: what is under way is answered, and nobody new is kept waiting."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.gateway.app import BODY, INFER, Far, repository, running, until
from tests.support.serving.hosts import echo_request
from tests.support.serving.oip_calls import INFER as GRPC_INFER
from tests.support.serving.oip_calls import STREAM
from tidegate import clock
from tidegate.oip.grpc.codec import message_from_request
from tidegate.rpc import oip_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PATIENT = {"tidegate-budget-ms": "20000"}
ASKED = message_from_request(echo_request(b"abc")).SerializeToString()


@asynccontextmanager
async def gateway_process(folder: Path, far: Far, **more: Any) -> AsyncIterator[tuple[Process, dict[str, str]]]:
    """A gateway process in front of `far`, and where it answers."""
    ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
    target = {"name": "main", "tier": "pool", "address": far.address}
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump({**ports, "model_repository": str(repository(folder)), "targets": [target], **more}))
    command = (sys.executable, "-P", "-m", "gateway", "--config", str(path))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60.0))
        yield process, ready["addresses"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def stopped_s(process: Process) -> float:
    """Tell it to stop; the seconds until it has ended, without an error."""
    began_at = clock.now()
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 60.0) == 0
    return clock.now() - began_at


async def post(session: aiohttp.ClientSession, addresses: dict[str, str]) -> tuple[int, Any, dict[str, str]]:
    async with session.post(addresses["http"] + INFER, json=BODY, headers=PATIENT) as response:
        headers = {name.lower(): text for name, text in response.headers.items()}
        return response.status, await response.json(), headers


async def ready_status(session: aiohttp.ClientSession, addresses: dict[str, str]) -> int:
    async with session.get(addresses["http"] + "/v2/health/ready") as response:
        return response.status


async def unready(session: aiohttp.ClientSession, addresses: dict[str, str]) -> None:
    async with asyncio.timeout(10.0):
        while await ready_status(session, addresses) == 200:
            await clock.sleep(0.01)


async def test_a_request_of_six_seconds_is_answered_after_sigterm(tmp_path: Path) -> None:
    far = Far("pool/main")
    far.host.takes_s = 6.0
    async with running(far), gateway_process(tmp_path, far) as (process, addresses), aiohttp.ClientSession() as session:
        asked = asyncio.create_task(post(session, addresses))
        await until(lambda: bool(far.host.calls))

        took_s = await stopped_s(process)

        status, body, headers = await asked
        assert (status, body["outputs"][0]["data"]) == (200, [1, 2, 3])
        assert headers["connection"] == "close"
        assert took_s < 6.0 + 3.0


async def test_new_callers_are_sent_elsewhere_while_it_drains_and_a_second_signal_cuts_nothing(tmp_path: Path) -> None:
    far = Far("pool/main")
    async with (
        running(far),
        gateway_process(tmp_path, far) as (process, addresses),
        aiohttp.ClientSession() as session,
        grpc.aio.insecure_channel(addresses["grpc"]) as channel,
        grpc.aio.insecure_channel(addresses["grpc"]) as idle_channel,
    ):
        stub = health_pb2_grpc.HealthStub(idle_channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        idle = idle_channel.stream_stream(STREAM)()
        await idle.wait_for_connection()
        far.host.gate.clear()
        asked = asyncio.create_task(post(session, addresses))
        unary = channel.unary_unary(GRPC_INFER)(ASKED, timeout=20.0)
        stream = channel.stream_stream(STREAM)(timeout=20.0)
        await stream.write(ASKED)
        await until(lambda: len(far.host.calls) == 3)

        process.send_signal(signal.SIGTERM)
        await unready(session, addresses)

        # Readiness, over both protocols
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        # New callers: over HTTP in words, over gRPC on connections of which none is left and no new one is made
        async with asyncio.timeout(2.0):
            status, body, headers = await post(session, addresses)
        assert (status, body["code"]) == (503, "nothing_alive")
        assert "shutting down" in body["error"]
        assert headers["retry-after-ms"] == "1000"
        assert headers["connection"] == "close"
        assert "x-should-retry" not in headers
        async with session.post(addresses["http"] + "/v1/embeddings", json={"model": "echo", "input": "a"}) as response:
            assert response.status == 503
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(GRPC_INFER)(ASKED, timeout=2.0)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        # A stream that waits for nothing is over at once
        async with asyncio.timeout(2.0):
            assert await idle.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(await idle.trailing_metadata())["retry-after-ms"] == "1000"
        process.send_signal(signal.SIGTERM)
        await unready(session, addresses)
        assert process.returncode is None

        far.host.gate.set()

        assert (await asked)[0] == 200
        assert oip_pb2.ModelInferResponse.FromString(await unary).raw_output_contents[0] == b"abc"
        answer = oip_pb2.ModelStreamInferResponse.FromString(await stream.read())
        assert answer.infer_response.raw_output_contents[0] == b"abc"
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(process.wait(), 5.0) == 0
        assert len(far.host.calls) == 3, "no new caller's request was computed"


async def test_without_requests_under_way_idle_callers_and_operators_delay_nothing(tmp_path: Path) -> None:
    far = Far("pool/main")
    async with (
        running(far),
        gateway_process(tmp_path, far) as (process, addresses),
        aiohttp.ClientSession() as session,
        grpc.aio.insecure_channel(addresses["grpc"]) as channel,
        session.get(addresses["admin"] + "/console/live") as console,
        session.get(addresses["admin"] + "/debug/recording?for=600") as recording,
    ):
        assert console.status == recording.status == 200
        assert (await post(session, addresses))[0] == 200  # its connection is kept
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        stream = channel.stream_stream(STREAM)()
        await stream.wait_for_connection()

        assert await stopped_s(process) < 3.0


async def test_a_request_that_outlasts_drain_s_is_cut(tmp_path: Path) -> None:
    far = Far("pool/main")
    far.host.gate.clear()
    async with (
        running(far),
        gateway_process(tmp_path, far, drain_s=1.0) as (process, addresses),
        aiohttp.ClientSession() as session,
    ):
        asked = asyncio.create_task(post(session, addresses))
        await until(lambda: bool(far.host.calls))
        assert 1.0 < await stopped_s(process) < 6.0
        with pytest.raises(aiohttp.ClientError):
            await asked
        await until(lambda: far.host.cancelled == 1)


async def test_an_answer_that_is_still_being_sent_is_waited_for(tmp_path: Path) -> None:
    far = Far("pool/main")
    far.host.answer_bytes = 12 * 2**20
    async with running(far), gateway_process(tmp_path, far) as (process, addresses):
        host, port = addresses["http"].removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
        body = json.dumps(BODY).encode()
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\ntidegate-budget-ms: 20000\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        stopping = asyncio.create_task(stopped_s(process))
        await clock.sleep(4.0)  # the caller takes its time; a hard-coded second is long over
        head_lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head_lines.partition("content-length: ")[2].partition("\r\n")[0])
        assert len(await reader.readexactly(length)) == length > 2**24
        writer.close()
        assert 4.0 < await stopping < 10.0

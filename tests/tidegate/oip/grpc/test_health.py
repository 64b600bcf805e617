"""The endpoints of a server about itself: health, readiness, index, reflection, its port and its line in a log."""

from __future__ import annotations

import aiohttp
import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.serving.host import FakeHost
from tests.support.serving.oip_servers import MAX_BYTES, Servers
from tidegate.oip.grpc.health import HealthService
from tidegate.oip.grpc.server import OipService, server_options
from tidegate.oip.http.server import OipRoutes


async def test_health_is_the_hosts_own_word(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for ready, status in ((True, "SERVING"), (False, "NOT_SERVING")):
            servers.host.is_ready = ready
            for service in ("", "inference.GRPCInferenceService"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == status
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_of_health_is_told_at_once(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        for service, status in (("", health_pb2.HealthCheckResponse.SERVING), ("other", 3)):
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
            assert (await watching.read()).status == status
            watching.cancel()


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
async def test_http_readiness_has_a_body_that_kserve_can_parse(servers: Servers, ready: bool, status: int) -> None:
    servers.host.is_ready = ready
    async with aiohttp.ClientSession(f"http://{servers.http}") as session:
        async with session.get("/v2/health/live") as response:
            assert (response.status, await response.json()) == (200, {"live": True})
        async with session.get("/v2/health/ready") as response:
            assert (response.status, await response.json()) == (status, {"live": True, "ready": ready})
        async with session.get("/v2/models/minilm/versions/1/ready") as response:
            assert (response.status, await response.json()) == (status, {"name": "minilm", "ready": ready})


async def test_the_index_can_be_of_ready_models_only(servers: Servers) -> None:
    servers.host.is_ready = False
    async with aiohttp.ClientSession(f"http://{servers.http}") as session:
        async with session.post("/v2/repository/index") as response:
            assert {entry["state"] for entry in await response.json()} == {"UNAVAILABLE"}
        async with session.post("/v2/repository/index", data=b'{"ready":true}') as response:
            assert await response.json() == []


async def test_reflection_describes_the_public_service(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
        async for answer in stub.ServerReflectionInfo(iter([asked])):
            file = descriptor_pb2.FileDescriptorProto()
            file.ParseFromString(answer.file_descriptor_response.file_descriptor_proto[0])
    assert file.package == "inference"
    methods = {method.name: method for method in file.service[0].method}
    assert methods["ModelInfer"].input_type == ".inference.ModelInferRequest"
    assert methods["ModelStreamInfer"].server_streaming
    assert "tidegate" not in str(file)


async def test_a_second_server_on_the_same_port_fails(servers: Servers) -> None:
    second = grpc.aio.server(options=server_options(MAX_BYTES))
    with pytest.raises(RuntimeError):
        second.add_insecure_port(servers.grpc)


def test_what_holds_state_says_so_in_a_line() -> None:
    host = FakeHost()
    assert repr(OipService(host, max_message_bytes=1)) == "<OipService tidegate 3 models>"
    assert repr(OipRoutes(host, max_body_bytes=1)) == "<OipRoutes tidegate 3 models>"
    assert repr(HealthService(host, ())) == "<HealthService tidegate serving>"

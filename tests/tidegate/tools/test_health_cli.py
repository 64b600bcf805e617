"""`tidegate health` against a real gRPC port: ready, not ready, nobody there, and over TLS with certificates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2_grpc

from cloud_pool.app import ASKS_HEALTH, GATEWAYS
from tests.support.certificates import FleetPki
from tidegate.oip.grpc.health import HEALTH_SERVICE, HealthService
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.tls import TlsConfig
from tidegate.servers.grpc_server import open_grpc_server
from tidegate.servers.role_guard import ServerSecurity
from tidegate.testing.ports import free_ports
from tidegate.tools.health_cli import _trouble, health


class Named:
    """What health needs of a host."""

    server_name = "named"

    def __init__(self) -> None:
        self.is_ready = True

    def ready(self) -> bool:
        return self.is_ready


@asynccontextmanager
async def serving(host: Any, secured: ServerSecurity | None = None, port: int = 0) -> AsyncIterator[int]:
    """A port with the health service; yields its number."""

    def add(server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(HealthService(host, ()), server)

    async with open_grpc_server(
        add, "127.0.0.1", port, max_message_bytes=1 << 20, grace_s=0.1, secured=secured
    ) as door:
        await door.server.start()
        yield int(door.address.rpartition(":")[2])


def section(config: TlsConfig) -> dict[str, str]:
    return {"cert": str(config.cert), "key": str(config.key), "ca": str(config.ca)}


async def ask(folder: Path, role: str, *words: str, **keys: Any) -> Result:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(keys))
    command = [role, "--config", str(path), "--timeout", "10", *words]
    return await asyncio.to_thread(CliRunner().invoke, health, command)


@pytest.mark.parametrize("role", ["gateway", "edge", "pool"])
async def test_each_process_is_asked_where_its_own_configuration_says(role: str, tmp_path: Path) -> None:
    host = Named()
    async with serving(host) as port:
        everywhere = await ask(tmp_path, role, grpc_port=port, host="0.0.0.0")
        host.is_ready = False
        not_ready = await ask(tmp_path, role, grpc_port=port)
        told = await ask(tmp_path, role, "--json", grpc_port=port)

    assert (everywhere.exit_code, everywhere.stdout) == (0, f"the {role} at 127.0.0.1:{port} is ready\n")
    assert not_ready.exit_code == 1
    assert not_ready.stderr == f"Error: the {role} at 127.0.0.1:{port} is not ready\n"
    assert told.exit_code == 1
    assert json.loads(told.stdout) == {
        "role": role, "address": f"127.0.0.1:{port}", "ready": False, "trouble": "is not ready"
    }  # fmt: skip


async def test_a_pool_with_several_servers_is_ready_when_each_is(tmp_path: Path) -> None:
    port = free_ports(2)
    hosts = Named(), Named()
    async with serving(hosts[0], port=port), serving(hosts[1], port=port + 1):
        ready = await ask(tmp_path, "pool", grpc_port=port, servers=2)
        hosts[1].is_ready = False
        not_ready = await ask(tmp_path, "pool", grpc_port=port, servers=2)

    assert ready.stdout.splitlines() == [
        f"the pool at 127.0.0.1:{port} is ready", f"the pool at 127.0.0.1:{port + 1} is ready"
    ]  # fmt: skip
    assert not_ready.exit_code == 1
    assert not_ready.stderr == f"Error: the pool at 127.0.0.1:{port + 1} is not ready\n"


async def test_where_nothing_listens_it_says_so(tmp_path: Path) -> None:
    async with serving(Named()) as port:
        pass

    answer = await ask(tmp_path, "pool", grpc_port=port)

    assert answer.exit_code == 1
    assert "does not answer" in answer.stderr and "refused" in answer.stderr


@pytest.mark.slow
async def test_it_waits_until_the_process_is_ready(tmp_path: Path) -> None:
    host = Named()
    host.is_ready = False
    async with serving(host) as port:
        asked = asyncio.create_task(ask(tmp_path, "pool", "--wait", "60", grpc_port=port))
        _done, under_way = await asyncio.wait({asked}, timeout=0.3)
        host.is_ready = True
        answer = await asked

    assert under_way
    assert answer.exit_code == 0


async def test_a_port_that_only_the_process_knows_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    answer = await ask(tmp_path, "pool", grpc_port=0)

    assert answer.exit_code == 1
    assert "'grpc_port' = 0" in str(answer.exception)


@pytest.mark.slow
async def test_over_tls_a_pool_answers_its_own_certificate(tmp_path: Path) -> None:
    pki = FleetPki(tmp_path / "pki")
    secured = ServerSecurity(pki.tls("pool/main"), GATEWAYS, narrowed={HEALTH_SERVICE: ASKS_HEALTH})
    async with serving(Named(), secured) as port:
        own = await ask(tmp_path, "pool", name="main", grpc_port=port, tls=section(pki.config("pool/main")))
        plain = await ask(tmp_path, "pool", name="main", grpc_port=port)
        another = await ask(tmp_path, "pool", name="other", grpc_port=port, tls=section(pki.config("pool/other")))
        edge = await ask(tmp_path, "edge", name="main", grpc_port=port, tls=section(pki.config("edge/main")))

    assert own.exit_code == 0, own.stderr
    assert plain.exit_code == another.exit_code == edge.exit_code == 1
    assert "certificate of another part" in another.stderr


async def test_a_device_learns_nothing_of_a_pools_health(tmp_path: Path) -> None:
    pki = FleetPki(tmp_path / "pki")
    secured = ServerSecurity(pki.tls("pool/main"), GATEWAYS, narrowed={HEALTH_SERVICE: ASKS_HEALTH})
    async with serving(Named(), secured) as port:
        # As a device that demands the pool's own name, which the check of names would not stop.
        dialler = pki.tls("edge/edge-1").dialler(CertificateIdentity("pool", "main"))
        trouble = await _trouble(dialler, f"127.0.0.1:{port}", 10.0)

    assert trouble is not None and "edge/edge-1" in trouble


async def test_files_of_certificates_that_are_not_there_are_named(tmp_path: Path) -> None:
    gone = {"cert": "/nonexistent/tls.crt", "key": "/nonexistent/tls.key", "ca": "/nonexistent/ca.crt"}

    answer = await ask(tmp_path, "pool", grpc_port=8101, tls=gone)

    assert answer.exit_code == 1
    assert "/nonexistent/tls.crt" in answer.stderr

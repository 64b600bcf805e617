"""Certificates that end while a connection is kept, or while a stream goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web

from gateway.core.fleet.link_events import LinkDown, LinkEvent, LinkUp
from gateway.targets.link import LinkTarget
from tests.support.certificates import FleetPki
from tests.support.gateway.app import Far, until
from tests.support.lost_time import LostTime
from tidegate import clock
from tidegate.link.service import LinkService
from tidegate.link.streams import MAX_ENVELOPE_BYTES, PATH
from tidegate.security.certificate_identity import CertificateIdentity, Role
from tidegate.security.tls import Tls
from tidegate.servers.grpc_server import open_grpc_server
from tidegate.servers.http_server import open_http_server
from tidegate.servers.role_guard import ServerSecurity

pytestmark = pytest.mark.slow
WITHIN_S = 1.3  # the second, and what a busy machine may stand still in it
EDGE = CertificateIdentity("edge", "attic")


@pytest.fixture
def pki(tmp_path: Path) -> FleetPki:
    return FleetPki(tmp_path / "pki")


@pytest.fixture
def months_later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list whose sum the time of day is ahead by."""
    ahead, true = [0.0], clock.utc_s
    monkeypatch.setattr(clock, "utc_s", lambda: true() + sum(ahead))
    return ahead


@asynccontextmanager
async def edge_served(tls: Tls, roles: frozenset[Role]) -> AsyncIterator[str]:
    far = Far(str(EDGE))
    link = LinkService(far.host, name=str(EDGE), epoch=lambda: 1, offers=lambda: far.offers, load=far.load)
    port = open_grpc_server(
        link.add_to, "127.0.0.1", 0, max_message_bytes=MAX_ENVELOPE_BYTES, grace_s=0.1,
        secured=ServerSecurity(tls, roles),
    )  # fmt: skip
    async with port as bound:
        await bound.server.start()
        yield bound.address


async def test_a_kept_connection_over_http_is_refused_once_its_certificate_has_ended(
    pki: FleetPki, months_later: list[float]
) -> None:
    async def hello(_request: web.Request) -> web.Response:
        return web.Response()

    secured = ServerSecurity(pki.tls("edge/attic"), frozenset({"gateway"}))
    port = open_http_server(
        [web.get("/", hello)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1, secured=secured
    )
    connector = aiohttp.TCPConnector(limit=1, ssl=pki.client("gateway/main"))
    async with port as url, aiohttp.ClientSession(connector=connector) as session:
        for expected in (200, 200, 403):
            async with session.get(url) as response:
                assert response.status == expected
                if expected == 403:
                    assert "has expired" in await response.text()
            months_later.append(20 * 86_400.0)
        # Certificates of this test are good for 30 days: the second request came after 20, the third after 40.


async def test_a_call_on_a_kept_channel_is_refused_once_its_certificate_has_ended(
    pki: FleetPki, months_later: list[float]
) -> None:
    async with edge_served(pki.tls("edge/attic"), frozenset({"gateway"})) as address:
        channel = pki.tls("gateway/main").dialler(EDGE).open(address, ())
        for good in (True, False):
            call = channel.stream_stream(PATH, None, None)(None)
            if good:
                await call.write(b"")
                call.cancel()
                months_later.append(40 * 86_400.0)
            else:
                assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "has expired" in str(await call.details())
        await channel.close()


@pytest.mark.parametrize("whose", ["gateway", "edge"])
async def test_a_dialled_stream_ends_with_the_certificate_of_either_side(pki: FleetPki, whose: str) -> None:
    began_at = clock.utc_s()
    gateway = pki.ending_in("gateway/main", 3.0) if whose == "gateway" else pki.tls("gateway/main")
    edge = pki.ending_in("edge/attic", 3.0) if whose == "edge" else pki.tls("edge/attic")
    async with edge_served(edge, frozenset({"gateway"})) as address:
        channel = gateway.dialler(EDGE).open(address, ())
        call = channel.stream_stream(PATH, None, None)(None)
        await call.wait_for_connection()
        async with asyncio.timeout(30.0), LostTime() as lost:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                while await call.read() is not grpc.aio.EOF:
                    pass
        lasted_s = clock.utc_s() - began_at
        await channel.close()

    assert "has expired" in str(ended.value.details())
    assert lasted_s > 1.5 and lasted_s - lost.s < 3.0 + WITHIN_S


async def test_a_gateway_gives_up_a_stream_that_it_dialled_when_its_own_certificate_ends(pki: FleetPki) -> None:
    events: list[LinkEvent] = []
    began_at = clock.utc_s()
    dialler = pki.ending_in("gateway/main", 3.0).dialler(EDGE)
    async with edge_served(pki.tls("edge/attic", require_client_cert=True), frozenset()) as address:  # checks nothing
        target = LinkTarget(
            str(EDGE), address, gateway_name="main", on_event=events.append, draw=lambda: 0.5, dialler=dialler
        )
        async with target, LostTime() as lost:
            await until(lambda: any(isinstance(one, LinkUp) for one in events), 10.0)
            await until(lambda: any(isinstance(one, LinkDown) for one in events), 10.0)
            lasted_s = clock.utc_s() - began_at

    (down,) = [one for one in events if isinstance(one, LinkDown)][:1]
    assert "this gateway's certificate has expired" in down.reason
    assert lasted_s - lost.s < 3.0 + WITHIN_S

"""Streams end with their credentials: within a second of a revocation, whatever is being streamed or waited for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path

import aiohttp
import grpc
import pytest
from structlog.testing import capture_logs

from edge_agent.core.dial_policy import DialPlan
from edge_agent.fleet.dialling import GatewayDialler
from gateway.app import Gateway
from gateway.core.access.api_key import KeyRecord
from gateway.delivery.artifacts.access import credential_check
from gateway.delivery.artifacts.pacing import BytePacer
from gateway.delivery.artifacts.server import ArtifactServer
from gateway.delivery.artifacts.store import ArtifactStore
from gateway.identity.key_file import edit_keys
from tests.support.certificates import FleetPki
from tests.support.gateway.app import Far, configured, until
from tests.support.gateway.guarded import Keys, guarded, keys_in
from tests.support.serving.oip_calls import STREAM
from tests.support.stream_end import HOUR_S, TimeOfDay, ended_s, time_of_day
from tidegate import clock
from tidegate.caller import Grant
from tidegate.link.service import LinkService
from tidegate.oip.http.server import error_middleware
from tidegate.security.tls import Tls
from tidegate.servers.http_server import open_http_server

pytestmark = pytest.mark.slow
WITHIN_S = 1.0
# Of the machine that runs the tests: what it may take for the rest.
SLACK_S = 0.3
ID = "edge/attic"
__all__ = ["time_of_day"]  # a fixture


def dialling(address: str, *, tls: Tls | None = None, key: str = "") -> GatewayDialler:
    far = Far(ID)
    link = LinkService(far.host, name=ID, epoch=lambda: 1, offers=lambda: far.offers, load=far.load)
    named = "gateway/main" if tls else ""
    return GatewayDialler(link, DialPlan("always"), {address: named}, dict, tls=tls, draw=lambda: 0.5, key=key)


async def cut(response: aiohttp.ClientResponse) -> None:
    """Read until the connection is cut in the middle of the answer."""
    with pytest.raises(aiohttp.ClientError):
        async for _ in response.content.iter_any():
            pass


def loses(keys: Keys, name: str, how: str) -> Callable[[], None]:
    """What takes its standing from a key."""

    def narrow(records: dict[str, KeyRecord]) -> None:
        one = records[keys.records[name].id]
        records[one.id] = type(one)(one.id, one.salt, one.secrets, Grant("ops", rights=("metrics",)), one.created_at)

    def do() -> None:
        if how == "revoked":
            return keys.revoke(name)
        with edit_keys(keys.path) as records:
            narrow(records) if how == "narrowed" else records.pop(keys.records[name].id)
        return None

    return do


@pytest.mark.parametrize("how", ["revoked", "narrowed", "removed"])
@pytest.mark.parametrize("path", ["/console/live", "/debug/recording?for=600"])
async def test_an_operators_stream_ends_with_its_key(tmp_path: Path, path: str, how: str) -> None:
    async with guarded(tmp_path, admin_host="0.0.0.0") as (gateway, session, keys, _):
        admin = gateway.addresses["admin"].replace("0.0.0.0", "127.0.0.1")
        async with session.get(admin + path, headers=keys.headers("operator")) as response:
            assert response.status == 200
            assert await ended_s(loses(keys, "operator", how), cut(response)) < WITHIN_S + SLACK_S
        async with session.get(admin + path, headers=keys.headers("operator")) as again:
            assert again.status in (401, 403)


async def test_an_operators_stream_ends_when_its_key_expires(tmp_path: Path, time_of_day: TimeOfDay) -> None:
    keys = keys_in(tmp_path)
    keys.add("short", Grant("ops", rights=("admin",)), expires_in_s=HOUR_S)
    async with guarded(tmp_path, keys, admin_host="0.0.0.0") as (gateway, session, _, _far):
        admin = gateway.addresses["admin"].replace("0.0.0.0", "127.0.0.1")
        async with session.get(admin + "/console/live", headers=keys.headers("short")) as response:
            left_s = (keys.records["short"].expires_at or 0.0) - clock.utc_s()
            time_of_day.passes(left_s - 60.0)
            assert await ended_s(lambda: time_of_day.passes(60.0), cut(response)) < WITHIN_S + SLACK_S


async def test_a_stream_of_inference_that_is_silent_ends_with_its_key(tmp_path: Path) -> None:
    async with (
        guarded(tmp_path) as (gateway, _, keys, _far),
        grpc.aio.insecure_channel(gateway.addresses["grpc"]) as channel,
    ):
        stream = channel.stream_stream(STREAM)(metadata=tuple(keys.headers("good").items()))
        await stream.wait_for_connection()
        assert await ended_s(loses(keys, "good", "revoked"), stream.code()) < WITHIN_S + SLACK_S
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "was revoked" in str(await stream.details())


async def test_a_devices_stream_ends_with_its_key_and_others_go_on(tmp_path: Path) -> None:
    keys = keys_in(tmp_path)
    key = keys.add("attic", Grant("attic", rights=("dial-in",)))
    config = configured(tmp_path, name="main", link_port=0, auth={"keys_file": keys.path})
    async with Gateway(config) as gateway, dialling(gateway.addresses["link"], key=key):
        await until(lambda: gateway.host.model_ready("echo"))
        gone = until(lambda: not gateway.host.model_ready("echo"))
        keys.revoke("good")  # somebody else's
        with capture_logs() as logs:
            assert await ended_s(loses(keys, "attic", "revoked"), gone) < WITHIN_S + SLACK_S
        assert any("was revoked" in str(one.get("reason")) for one in logs)
        await clock.sleep(1.5)
        assert not gateway.host.model_ready("echo"), "it is not let in again"


async def test_a_devices_stream_ends_with_its_certificate(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, time_of_day: TimeOfDay
) -> None:
    pki = FleetPki(tmp_path_factory.mktemp("pki"))
    tls = pki.config("gateway/main").model_dump(exclude_none=True)
    async with (
        Gateway(configured(tmp_path, name="main", tls=tls, link_port=0)) as gateway,
        dialling(gateway.addresses["link"], tls=pki.ending_in(ID, HOUR_S)),
    ):
        await until(lambda: gateway.host.model_ready("echo"))
        time_of_day.passes(HOUR_S - 60.0)  # it goes on as long as its certificate is good
        gone = until(lambda: not gateway.host.model_ready("echo"))
        with capture_logs() as logs:
            assert await ended_s(lambda: time_of_day.passes(60.0), gone) < WITHIN_S + SLACK_S
        assert any("certificate has expired" in str(one.get("reason")) for one in logs)


def stored(folder: Path) -> tuple[ArtifactStore, str]:
    """A store with one artefact of 4 MiB, and its digest."""
    contents = bytes(4 * 2**20)
    digest = sha256(contents).hexdigest()
    store = ArtifactStore(folder)
    path = store.path(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)
    return store, digest


async def test_a_download_ends_with_its_key(tmp_path: Path) -> None:
    store, digest = stored(tmp_path / "store")
    async with guarded(tmp_path) as (gateway, session, keys, _), AsyncExitStack() as stack:
        slow = ArtifactServer(store, admit=credential_check(gateway.guard, None), pace=BytePacer(200_000.0))
        door = open_http_server(
            slow.routes(), "127.0.0.1", 0, key="artifacts.port", max_body_bytes=4096, grace_s=0.1,
            middlewares=[error_middleware],
        )  # fmt: skip
        url = await stack.enter_async_context(door)
        async with session.get(f"{url}/artifacts/sha256/{digest}", headers=keys.headers("good")) as response:
            assert response.status == 200
            assert await ended_s(loses(keys, "good", "revoked"), cut(response)) < WITHIN_S + SLACK_S
        await until(lambda: slow.under_way == 0)


async def test_a_download_ends_with_the_devices_certificate_and_a_new_one_goes_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, time_of_day: TimeOfDay
) -> None:
    pki = FleetPki(tmp_path_factory.mktemp("pki"))
    tls = pki.config("gateway/main").model_dump(exclude_none=True)
    _, digest = stored(tmp_path / "store")
    section = {"folder": tmp_path / "store", "port": 0, "bytes_per_s": 300_000.0}
    config = configured(tmp_path, name="main", tls=tls, artifacts=section, mqtt="mqtts://localhost:9")
    ending, renewed = pki.ending_in(ID, HOUR_S).client_context(), pki.tls(ID).client_context()
    async with Gateway(config) as gateway, aiohttp.ClientSession() as session:
        url = f"{gateway.addresses['artifacts']}/artifacts/sha256/{digest}"
        with capture_logs() as logs:
            async with session.get(url, ssl=ending) as response:
                assert response.status == 200
                time_of_day.passes(HOUR_S - 60.0)
                assert await ended_s(lambda: time_of_day.passes(60.0), cut(response)) < WITHIN_S + SLACK_S
        assert any("certificate has expired" in str(one.get("reason")) for one in logs)
        going_on = {"Range": "bytes=4000000-"}
        async with session.get(url, headers=going_on, ssl=renewed) as rest:
            assert rest.status == 206 and len(await rest.read()) == 4 * 2**20 - 4_000_000

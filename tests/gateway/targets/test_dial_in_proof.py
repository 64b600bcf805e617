"""The devices that a whole gateway accepts at its link port, by certificate or key, and what they can be asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from edge_agent.config import EdgeConfig
from edge_agent.core.dial_policy import DialPlan
from edge_agent.fleet.dialling import GatewayDialler, configured_gateways, read_key
from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from gateway.link_port import advertised_dial_address
from gateway.targets.accepted_link import UNBOUND
from tests.support.certificates import FleetPki
from tests.support.gateway.app import Far, configured, until
from tests.support.gateway.guarded import keys_in
from tidegate.caller import Grant
from tidegate.config import ConfigError, load
from tidegate.fleet.messages import GatewayState
from tidegate.link.service import LinkService
from tidegate.runtime.process import StartError
from tidegate.security.tls import Tls

pytestmark = pytest.mark.slow
ID = "edge/attic"


def service(name: str = ID) -> LinkService:
    far = Far(name)
    return LinkService(far.host, name=name, epoch=lambda: 1, offers=lambda: far.offers, load=far.load)


def dialling(address: str, *, name: str = ID, named: str = "", tls: Tls | None = None, key: str = "") -> GatewayDialler:
    return GatewayDialler(service(name), DialPlan("always"), {address: named}, dict, tls=tls, draw=lambda: 0.5, key=key)


@asynccontextmanager
async def secured(folder: Path, pki: FleetPki, **more: Any) -> AsyncIterator[Gateway]:
    tls = pki.config("gateway/main").model_dump(exclude_none=True)
    async with Gateway(configured(folder, name="main", tls=tls, link_port=0, **more)) as gateway:
        yield gateway


async def refused(words: str, logs: list[Any]) -> None:
    """Until somebody's log has the words."""
    await until(lambda: any(words in f"{one.get('reason')} {one.get('ended')}" for one in logs), 30.0)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> FleetPki:
    return FleetPki(tmp_path_factory.mktemp("pki"))


async def test_over_tls_a_certificate_names_the_device(tmp_path: Path, pki: FleetPki) -> None:
    async with secured(tmp_path, pki) as gateway:
        address = gateway.addresses["link"]
        with capture_logs() as logs:
            async with dialling(address, name="edge/other", named="gateway/main", tls=pki.tls(ID)):
                await refused("it says that it is edge/other and shows the credential of edge/attic", logs)
        assert not gateway.fleet.targets

        async with dialling(address, named="gateway/main", tls=pki.tls(ID)):
            await until(lambda: gateway.host.model_ready("echo"), 30.0)
            assert gateway.fleet.targets[ID].path_kind == "dialled out"


async def test_only_devices_have_a_certificate_for_this_port(tmp_path: Path, pki: FleetPki) -> None:
    async with secured(tmp_path, pki) as gateway:
        with capture_logs() as logs:
            async with dialling(gateway.addresses["link"], named="gateway/main", tls=pki.tls("gateway/other")):
                await refused("this needs the certificate of a edge; yours is gateway/other", logs)
        with capture_logs() as logs:
            async with dialling(gateway.addresses["link"]):
                await refused("UNAVAILABLE", logs)
        assert not gateway.fleet.targets


async def test_a_device_dials_the_gateway_of_that_name_and_no_other(tmp_path: Path, pki: FleetPki) -> None:
    async with secured(tmp_path, pki) as gateway:
        with capture_logs() as logs:
            async with dialling(gateway.addresses["link"], named="gateway/other", tls=pki.tls(ID)):
                await refused("whoever answers there shows the certificate of another part", logs)
        assert not gateway.fleet.targets


async def test_where_evidence_is_asked_for_a_device_that_dialled_says_that_it_has_none(
    tmp_path: Path, pki: FleetPki
) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text("")
    async with (
        secured(tmp_path, pki, attestation={"allowed": allowed}) as gateway,
        dialling(gateway.addresses["link"], named="gateway/main", tls=pki.tls(ID)),
    ):
        await until(lambda: ID in gateway.fleet.targets and gateway.fleet.targets[ID].up, 30.0)
        assert gateway.fleet.targets[ID].attestation == UNBOUND


async def test_without_tls_a_key_names_the_device(tmp_path: Path) -> None:
    keys = keys_in(tmp_path)
    own = keys.add("attic", Grant("attic", rights=("dial-in",)))
    config = configured(tmp_path, name="main", link_port=0, auth={"keys_file": keys.path})
    async with Gateway(config) as gateway:
        address = gateway.addresses["link"]
        for key, words in (
            ("", "this gateway wants a credential"),
            (keys.texts["good"], "has no right 'dial-in'"),
            (keys.texts["revoked"], "was revoked"),
        ):
            with capture_logs() as logs:
                async with dialling(address, key=key):
                    await refused(words, logs)
        with capture_logs() as logs:
            async with dialling(address, name="edge/cellar", key=own):
                await refused("shows the credential of edge/attic", logs)
        assert not gateway.fleet.targets

        async with dialling(address, key=own):
            await until(lambda: gateway.host.model_ready("echo"), 30.0)


async def test_a_device_that_leaves_is_gone_and_a_gateway_that_stops_lets_it_go(tmp_path: Path) -> None:
    async with Gateway(configured(tmp_path, name="main", link_port=0)) as gateway:
        async with dialling(gateway.addresses["link"]):
            await until(lambda: gateway.host.model_ready("echo"), 30.0)
        await until(lambda: ID not in gateway.fleet.targets, 30.0)

        link = service()
        heard = {"main": GatewayState("main", True, 1, links=(gateway.addresses["link"],))}
        out = GatewayDialler(link, DialPlan("auto", patience_s=0.0), {}, lambda: heard, tls=None, draw=lambda: 0.5)
        await out.__aenter__()
        await until(lambda: out.up == {"gateway/main"}, 30.0)
    async with asyncio.timeout(30.0):
        await until(lambda: link.streams == 0, 30.0)
    await out.__aexit__(None, None, None)


def test_devices_are_told_where_to_dial_unless_only_they_can_know() -> None:
    def told(**keys: Any) -> tuple[str, ...]:
        return advertised_dial_address(load(GatewayConfig, link_port=8004, **keys), "10.0.0.1:8004")

    assert told(host="10.0.0.1") == ("10.0.0.1:8004",)
    assert told(host="0.0.0.0") == ()
    assert told(host="0.0.0.0", link_advertise="gw.example.com:443") == ("gw.example.com:443",)


async def test_what_a_broker_says_is_dialled_only_if_it_is_an_address() -> None:
    heard = {"main": GatewayState("main", True, 1, links=("unix:/run/x.sock", "http://169.254.169.254/", "a:b:1", ""))}
    roads = DialPlan("always")
    out = GatewayDialler(service(), roads, {}, lambda: heard, tls=None, draw=lambda: 0.5)

    assert out.gateways() == {}


def test_addresses_and_keys_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    assert configured_gateways(("main@gw.lan:8004", "10.0.0.1:8004")) == {
        "gw.lan:8004": "gateway/main",
        "10.0.0.1:8004": "",
    }
    for wrong in ("http://gw.lan", "gw.lan", "gw.lan:0", "gw.lan:65536", "unix:/run/x.sock:1", "@gw.lan:1", "a b:1"):
        with pytest.raises(ConfigError, match="is no HOST:PORT or NAME@HOST:PORT"):
            load(EdgeConfig, gateways=[wrong])
    assert load(EdgeConfig, gateways=["main@[fd00::1]:8004"]).gateways == ("main@[fd00::1]:8004",)
    with pytest.raises(StartError, match="dial_key_file"):
        read_key(tmp_path / "nothing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(StartError, match="holds no key"):
        read_key(tmp_path / "empty")
    with pytest.raises(ValueError, match="link_port needs edge_transport: link"):
        configured(tmp_path, link_port=0, edge_transport="unary")

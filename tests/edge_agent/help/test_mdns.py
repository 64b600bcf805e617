"""Agents that find each other by multicast DNS on loopback, and announcements that are somebody else's."""

from __future__ import annotations

import socket
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from edge_agent.core.help.announcement import SERVICE, group_of, properties_of, service_of
from edge_agent.help.mdns import MOST_SERVICES, MdnsNeighbours, MdnsScope
from tests.edge_agent.help.test_helping import edge, x
from tests.edge_agent.help.test_neighbours import ANSWERS, Two, empty
from tests.edge_agent.test_app import eventually
from tests.support.certificates import FleetPki
from tests.support.models.tiny_models import tiny_repository
from tidegate import clock
from tidegate.config import ConfigError, load
from tidegate.runtime.process import StartError

pytestmark = pytest.mark.slow
LOOPBACK = ("127.0.0.1",)


@pytest.fixture
def fleet() -> str:
    """Other runs of these tests on this machine are other fleets."""
    pytest.importorskip("zeroconf")
    return f"f{uuid.uuid4().hex[:12]}"


@asynccontextmanager
async def announced(name: str, port: int, fleet: str, site: str = "") -> AsyncIterator[None]:
    """Somebody who announces what it likes."""
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

    network = AsyncZeroconf(list(LOOPBACK))
    info = AsyncServiceInfo(
        SERVICE,
        service_of(name, group_of(fleet, site)),
        addresses=[socket.inet_aton("127.0.0.1")],
        port=port,
        properties=properties_of(fleet, site),
        server=f"{uuid.uuid4().hex}.local.",
    )
    await (await network.async_register_service(info, cooperating_responders=True))
    try:
        yield
    finally:
        await network.async_close()


def keys(fleet: str, pki: FleetPki, name: str, **mdns: Any) -> dict[str, Any]:
    tls = pki.config(f"edge/{name}").model_dump(exclude_none=True)
    return {"fleet": fleet, "tls": tls, "mdns": {"interfaces": LOOPBACK, **mdns}}


@pytest.mark.parametrize(
    ("help", "mdns"), [({"neighbours": ["near"]}, {}), ({}, {"devices": ["ne*"]})], ids=["by name", "by glob"]
)
async def test_a_neighbour_is_found_asked_and_forgotten_when_it_says_goodbye(
    tmp_path: Path, fleet: str, help: dict[str, Any], mdns: dict[str, Any]
) -> None:
    pki, models = FleetPki(tmp_path / "pki"), tiny_repository(tmp_path / "m")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        of_device = keys(fleet, pki, "kiosk", **mdns)
        device = await enter(
            edge("kiosk", empty(tmp_path / "none"), tmp_path, help=help, dial_out="never", **of_device)
        )
        near = edge("near", models, tmp_path, answer_neighbours=ANSWERS, **keys(fleet, pki, "near"))
        async with near:
            running = Two(device, near, await enter(aiohttp.ClientSession()))
            await eventually(lambda: bool(running.told()["helps"]))
            assert device.mdns is not None and near.mdns is not None
            found = {"near": near.addresses["grpc"]}
            assert device.mdns.told() == {"announced": "", "followed": 1, "found": found, "trouble": ""}
            assert near.mdns.told()["announced"] == near.addresses["grpc"].replace(":", " port ")
        await eventually(lambda: device.help is not None and device.help.told(clock.now()) == [])


async def test_without_tls_a_caller_is_answered_by_a_found_neighbour_on_loopback_alone(
    tmp_path: Path, fleet: str
) -> None:
    common = {"fleet": fleet, "mdns": {"interfaces": LOOPBACK, "site": "north"}}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        near = await enter(edge("near", tiny_repository(tmp_path / "m"), tmp_path, answer_neighbours=ANSWERS, **common))
        await enter(announced("near", 9, f"{fleet}x"))  # of another fleet, and of another site
        await enter(announced("till", 9, fleet, "south"))
        help = {"neighbours": ["near", "till"]}
        device = await enter(edge("kiosk", empty(tmp_path / "none"), tmp_path, help=help, **common))
        running = Two(device, near, await enter(aiohttp.ClientSession()))
        await eventually(lambda: bool(running.told()["helps"]))
        status, headers, _ = await running.ask("double", x([[1.0, 2.0]]))
        assert (status, headers["tidegate-served-by"]) == (200, "edge/near")
        assert device.mdns is not None and device.mdns.found == {"near": near.addresses["grpc"]}


async def test_who_announces_anothers_name_has_no_certificate_for_it(tmp_path: Path, fleet: str) -> None:
    pki, models = FleetPki(tmp_path / "pki"), tiny_repository(tmp_path / "m")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        tls = keys(fleet, pki, "other")["tls"]
        other = await enter(edge("other", models, tmp_path, fleet=fleet, tls=tls, answer_neighbours=ANSWERS))
        port = int(other.addresses["grpc"].rpartition(":")[2])
        await enter(announced("near", port, fleet))
        of_device = keys(fleet, pki, "kiosk")
        none = empty(tmp_path / "none")
        device = await enter(edge("kiosk", none, tmp_path, help={"neighbours": ["near"]}, **of_device))
        running = Two(device, other, await enter(aiohttp.ClientSession()))
        await eventually(lambda: "the certificate of another part" in running.told()["why_not"])
        for _ in range(30):  # it goes on trying, and never gets through
            assert not running.told()["helps"]
            await clock.sleep(0.1)


async def test_a_flood_of_announcements_is_bounded(fleet: str) -> None:
    """Of names that are looked for, each with an address of its own: no more are followed than have places."""
    from zeroconf import DNSIncoming, DNSOutgoing, DNSPointer, DNSService, DNSText
    from zeroconf.const import _FLAGS_QR_RESPONSE

    looks = MdnsNeighbours(
        "kiosk", MdnsScope(fleet, "", LOOPBACK, 60.0), address=None, looks_for=lambda _: True, named=("mine",)
    )
    async with looks, announced("mine", 7, fleet):
        await eventually(lambda: "mine" in looks.found)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            for number in range(400):
                service = service_of(f"fake-{number}", group_of(fleet, ""))
                out = DNSOutgoing(_FLAGS_QR_RESPONSE)
                out.add_answer_at_time(DNSPointer(SERVICE, 12, 1, 4500, service), 0)
                out.add_answer_at_time(DNSService(service, 33, 0x8001, 4500, 0, 0, number + 1, "a.local."), 0)
                txt = bytes((3,)) + b"v=1" + bytes((6 + len(fleet),)) + b"fleet=" + fleet.encode()
                out.add_answer_at_time(DNSText(service, 16, 0x8001, 4500, txt), 0)
                for packet in out.packets():
                    assert DNSIncoming(packet).valid
                    sender.sendto(packet, ("224.0.0.251", 5353))
        await clock.sleep(3.0)
        assert looks.told()["followed"] == MOST_SERVICES
        assert "mine" in looks.found and len(looks.found) <= 16


async def test_it_goes_on_trying_where_there_is_no_network(fleet: str) -> None:
    scope = MdnsScope(fleet, "", ("192.0.2.250",), 60.0)
    async with MdnsNeighbours("kiosk", scope, address=None, looks_for=lambda _: True) as looks:
        await eventually(lambda: looks.told()["trouble"] == "no interface has an IPv4 address")
        assert looks.found == {}


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    monkeypatch.setitem(sys.modules, "ifaddr", None)
    config = load(EdgeConfig, name="kiosk", mdns={"interfaces": LOOPBACK}, help={"neighbours": ["near"]})
    with pytest.raises(StartError, match=r"key 'mdns' needs zeroconf .*pip install 'tidegate\[mdns\]'"):
        EdgeApp(config, draw=lambda: 0.1)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mdns": {}}, "set `answer_neighbours` or `help`"),
        ({"mdns": {}, "help": {"neighbours": ["near"]}}, "only certificates tell who answers"),
        ({"mdns": {"interfaces": ["192.168.1.5"]}, "help": {"neighbours": ["near"]}}, "only certificates tell"),
        ({"mdns": {"interfaces": ["eth0"]}, "help": {"neighbours": ["near"]}}, "mdns.interfaces"),
        ({"mdns": {"interfaces": LOOPBACK}, "help": {}}, "help needs a gateway to ask"),
        ({"mdns": {"ttl_s": 1}, "help": {"neighbours": ["near"]}}, "mdns.ttl_s"),
        ({"name": "n" * 64, "mdns": {"interfaces": LOOPBACK}, "help": {"neighbours": ["a"]}}, "longer than 54"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_in_words(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(EdgeConfig, **({"name": "kiosk"} | keys))


def test_a_device_that_listens_on_loopback_is_not_announced_to_others(tmp_path: Path) -> None:
    tls = FleetPki(tmp_path).config("edge/kiosk").model_dump(exclude_none=True)
    with pytest.raises(ConfigError, match=r"listens on host: 127\.0\.0\.1: no other reaches that"):
        load(EdgeConfig, name="kiosk", tls=tls, mdns={}, answer_neighbours=ANSWERS)
    assert load(EdgeConfig, name="kiosk", host="0.0.0.0", tls=tls, mdns={}, answer_neighbours=ANSWERS).mdns is not None

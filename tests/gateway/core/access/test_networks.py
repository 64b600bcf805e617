"""Which addresses a device may advertise, and what a name must resolve to."""

from __future__ import annotations

import pytest

from gateway.core.access.networks import LOOPBACK, PRIVATE, AllowedNetworks, host_and_port


@pytest.mark.parametrize(("host", "inside"), [
    ("10.0.0.0", True), ("10.255.255.255", True), ("9.255.255.255", False), ("11.0.0.0", False),
    ("172.31.255.255", True), ("172.32.0.0", False), ("192.168.7.7", True), ("100.64.0.1", True),
    ("169.254.169.254", False), ("127.0.0.1", False), ("8.8.8.8", False), ("0.0.0.0", False),
    ("fd00::1", True), ("fe80::1", False), ("::1", False), ("::ffff:10.0.0.1", True), ("::ffff:8.8.8.8", False),
    ("kiosk.local", False),
])  # fmt: skip
def test_private_networks_are_inside_and_all_else_is_not(host: str, inside: bool) -> None:
    assert (host in AllowedNetworks(PRIVATE)) is inside


def test_loopback_is_allowed_where_it_is_named() -> None:
    networks = AllowedNetworks((*PRIVATE, *LOOPBACK))
    assert "127.0.0.1" in networks and "::1" in networks
    assert networks.why_not("kiosk.local") == ""  # to be resolved
    assert "in no network" in networks.why_not("8.8.8.8")
    assert repr(AllowedNetworks(["10.0.0.0/8"])) == "<AllowedNetworks 10.0.0.0/8>"


def test_a_name_is_dialled_only_where_all_its_addresses_are_allowed() -> None:
    networks = AllowedNetworks(PRIVATE)
    assert networks.pick("kiosk", ["10.0.0.7", "10.0.0.8"]) == "10.0.0.7"
    with pytest.raises(ValueError, match=r"kiosk is 169\.254\.169\.254"):
        networks.pick("kiosk", ["10.0.0.7", "169.254.169.254"])
    with pytest.raises(ValueError, match="has no address"):
        networks.pick("kiosk", [])


@pytest.mark.parametrize(("address", "found"), [
    ("10.0.0.7:9001", ("10.0.0.7", "9001")),
    ("[fd00::1]:9001", ("fd00::1", "9001")),
    ("kiosk-2.local:1", ("kiosk-2.local", "1")),
    ("kiosk:65536", None), ("kiosk:0", None), ("kiosk", None), ("kiosk:", None), (":9001", None),
    ("unix:/run/secret.sock", None), ("dns:///metadata:80", None), ("ipv4:10.0.0.1,8.8.8.8:9", None),
    ("127.1:80", None), ("2130706433:80", None), ("0x7f.0.0.1:80", None), ("a b:80", None),
])  # fmt: skip
def test_an_address_is_a_host_and_a_port_and_nothing_that_grpc_would_read_otherwise(
    address: str, found: tuple[str, str] | None
) -> None:
    assert host_and_port(address) == found

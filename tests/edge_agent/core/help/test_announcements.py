"""What is believed of an announcement by mDNS, and how often a change of it is followed. Pure."""

from __future__ import annotations

from ipaddress import IPv4Interface

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.help.announced_neighbours import KEEP_S, MOST_NEIGHBOURS, SETTLE_S, AnnouncedNeighbours
from edge_agent.core.help.announcement import SERVICE, address_of, device_of, group_of, is_of, properties_of, service_of
from edge_agent.core.help.neighbour_addresses import neighbour_addresses

GROUP = group_of("shop", "north")
OWN = (IPv4Interface("192.168.1.5/24"), IPv4Interface("172.17.0.1/16"))


@pytest.mark.parametrize("name", ["kiosk-1", "till.shop", "a~b_c", "9"])
def test_an_instance_is_called_as_its_device_and_by_its_fleet_and_site(name: str) -> None:
    assert service_of(name, GROUP).count(".") == SERVICE.count(".") + 1  # one label
    assert device_of(service_of(name, GROUP), GROUP) == name
    for other in (("shop", "south"), ("other", "north"), ("shop\nnorth", "")):
        assert device_of(service_of(name, group_of(*other)), GROUP) == ""


@pytest.mark.parametrize(
    "service",
    [SERVICE, f".{SERVICE}", f"a b c\x00.{SERVICE}", f"a.b.{SERVICE}", "kiosk._http._tcp.local.", "", "x" * 900],
)
def test_what_is_no_devices_instance_is_none(service: str) -> None:
    assert device_of(service, GROUP) == ""


@pytest.mark.parametrize(
    ("txt", "is_ours"),
    [
        (properties_of("shop", "north"), True),
        (properties_of("shop", "south"), False),
        (properties_of("other", "north"), False),
        ({"fleet": "shop", "site": "north"}, False),
        ({**properties_of("shop", "north"), "more": "x" * 40}, True),
        ({**properties_of("shop", "north"), "more": "x" * 600}, False),
        ({}, False),
    ],
)
def test_only_announcements_of_this_fleet_and_site_are_ours(txt: dict[str, str], is_ours: bool) -> None:
    raw = {key.encode(): value.encode() or None for key, value in txt.items()}
    assert is_of(raw, "shop", "north") is is_ours
    assert is_of({b"v": b"1", b"fleet": b"shop", b"site": None}, "shop", "")


@pytest.mark.parametrize(
    ("addresses", "port", "found"),
    [
        (["172.17.0.1", "10.8.0.9", "192.168.1.7"], 9001, "192.168.1.7:9001"),
        (["10.8.0.9", "172.17.0.1"], 9001, "172.17.0.1:9001"),  # another agent on this machine
        (["10.8.0.9"], 9001, "10.8.0.9:9001"),
        (["224.0.0.251", "0.0.0.0", "255.255.255.255", "fe80::1", "x"], 9001, ""),
        (["192.168.1.7"], 0, ""),
        (["192.168.1.7"], None, ""),
        (["192.168.1.7"], 70_000, ""),
        ([], 9001, ""),
    ],
)
def test_an_address_in_an_own_network_is_taken_first(addresses: list[str], port: int | None, found: str) -> None:
    assert address_of(addresses, port, OWN) == found


def test_what_is_not_heard_again_is_forgotten_and_a_goodbye_at_once() -> None:
    table = AnnouncedNeighbours()
    table.heard("one", "10.0.0.1:1", 0.0)
    table.heard("two", "10.0.0.2:1", 0.0)
    table.heard("one", "10.0.0.1:1", KEEP_S)
    assert table.found(KEEP_S + 1) == {"one": "10.0.0.1:1"}
    table.gone("one")
    table.gone("nobody")
    assert table.found(KEEP_S + 1) == {}


def test_who_flickers_is_followed_once_in_a_while() -> None:
    table, changes, before = AnnouncedNeighbours(), 0, dict[str, str]()
    for tick in range(int(3 * SETTLE_S)):
        table.heard("one", f"10.0.0.{tick % 2}:1", float(tick))
        if tick % 3 == 0:
            table.gone("one")
        changes += before != (before := table.found(float(tick))) and bool(before)
    assert changes <= 4
    table.heard("one", "10.0.0.9:1", 6 * SETTLE_S)
    assert table.found(6 * SETTLE_S) == {"one": "10.0.0.9:1"}


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.booleans(), st.floats(0, 3)), max_size=200))
def test_no_more_are_kept_than_asked_and_the_configured_have_their_places(
    events: list[tuple[int, int, bool, float]],
) -> None:
    table, now = AnnouncedNeighbours(["mine"]), 0.0
    for number, host, goodbye, passed in events:
        now += passed
        if goodbye:
            table.gone(f"n{number}")
        else:
            table.heard(f"n{number}", f"10.0.0.{host}:1", now)
        assert len(table.found(now)) < MOST_NEIGHBOURS
    table.heard("mine", "10.0.0.9:1", now)
    assert table.found(now)["mine"] == "10.0.0.9:1"


def test_an_announcement_fills_in_and_overrides_nothing() -> None:
    configured, published = ["kiosk-1", "kiosk-2@10.0.0.2:1", "kiosk-3", "kiosk-4"], {"kiosk-3": ("10.0.0.3:1",)}
    announced = {
        "kiosk-1": "10.0.0.1:1",
        "kiosk-2": "6.6.6.6:6",
        "kiosk-3": "6.6.6.6:6",
        "kiosk-4": "10.0.0.2:1",  # at another one's address
        "kiosk-5": "10.0.0.5:1",
        "own": "10.0.0.7:1",
    }
    assert neighbour_addresses(configured, published, "own", announced) == {
        "10.0.0.2:1": "edge/kiosk-2",
        "10.0.0.3:1": "edge/kiosk-3",
        "10.0.0.1:1": "edge/kiosk-1",
        "10.0.0.5:1": "edge/kiosk-5",
    }

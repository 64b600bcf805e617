"""A device that advertises another host's address is not dialled, and an operator can see why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.core.access.networks import LOOPBACK, AllowedNetworks
from gateway.targets.dial_address import allowed_address
from gateway.targets.link import LinkTarget


async def _found(*addresses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(addresses)

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        return [(2, 1, 6, "", (next(answers), port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


async def test_a_name_is_resolved_at_each_dial_and_the_address_that_was_checked_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await _found("10.0.0.7", "169.254.169.254", monkeypatch=monkeypatch)
    networks = AllowedNetworks(["10.0.0.0/8"])

    assert await allowed_address(networks, "kiosk.local:9001") == "10.0.0.7:9001"
    with pytest.raises(ValueError, match=r"kiosk\.local is 169\.254\.169\.254"):
        await allowed_address(networks, "kiosk.local:9001")
    with pytest.raises(ValueError, match="no HOST:PORT"):
        await allowed_address(networks, "unix:/run/x.sock")


async def test_a_link_to_an_address_that_is_not_allowed_opens_no_connection() -> None:
    knocks = 0

    async def count(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        knocks += 1
        writer.close()

    events: list[Any] = []
    server = await asyncio.start_server(count, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def refuse(address: str) -> str:
        return await allowed_address(AllowedNetworks(["10.0.0.0/8"]), address)

    told = asyncio.Event()

    def on_event(event: Any) -> None:
        events.append(event)
        told.set()

    target = LinkTarget(
        "edge/a", f"127.0.0.1:{port}", gateway_name="g", on_event=on_event, draw=lambda: 0.5, resolve=refuse
    )
    async with server, target, asyncio.timeout(30.0):
        await told.wait()

    assert knocks == 0
    assert "in no network of advertised_networks" in events[0].reason
    assert "127.0.0.1" in AllowedNetworks(LOOPBACK)

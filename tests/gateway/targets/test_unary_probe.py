"""The probes of a target that is called with plain OIP: what ends one of them ends no other."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.fleet.link_events import LinkEvent, LinkUp
from gateway.targets import unary
from gateway.targets.unary import UnaryTarget
from tests.support.gateway.targets import MAX_MESSAGE_BYTES, Server
from tidegate.fleet.offers import ModelOffer
from tidegate.models.manifest import Manifest

pytestmark = pytest.mark.slow


async def test_a_defect_in_what_a_server_says_of_itself_ends_one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[LinkEvent] = []
    up = asyncio.Event()
    described, true = [0], unary.offer_of

    def stumbling(manifest: Manifest) -> ModelOffer:
        described[0] += 1
        if described[0] < 3:
            raise ZeroDivisionError("a defect")
        return true(manifest)

    monkeypatch.setattr(unary, "offer_of", stumbling)

    def note(event: LinkEvent) -> None:
        events.append(event)
        if isinstance(event, LinkUp):
            up.set()

    server = Server("pool/a")
    await server.start()
    try:
        target = UnaryTarget(
            "pool/a",
            server.address,
            foreign=True,
            models=("echo",),
            on_event=note,
            probe_interval_s=0.05,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
        async with target, asyncio.timeout(30.0):
            await up.wait()
            assert target.connected and described[0] == 3
    finally:
        await server.kill()

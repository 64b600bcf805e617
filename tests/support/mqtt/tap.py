"""An `MqttLink` whose events are kept, for tests that look at them in any order."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.mqtt.brokers import Signal
from tidegate.mqtt.link import LinkEvent, MqttConnected, MqttLink, MqttMessage, Will


class Tap:
    """A link whose events are kept, in order."""

    def __init__(self, url: str, *filters: str, qos: int = 1, **settings: Any) -> None:
        self.activity = Signal()
        self.events: list[LinkEvent] = []
        defaults: dict[str, Any] = {
            "client_id": f"test-{uuid.uuid4().hex[:12]}",
            "draw": random.random,
            "backoff_base_s": 0.05,
            "backoff_cap_s": 0.2,
        }
        self.link = MqttLink(
            url,
            subscriptions=tuple((one, qos) for one in filters),
            on_activity=self.activity,
            **(defaults | settings),
        )

    def look(self) -> list[LinkEvent]:
        self.events += self.link.take()
        return self.events

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.look() if isinstance(event, kind)]

    async def until_connected(self, session: int = 1) -> None:
        await self.activity.until(lambda: any(event.session == session for event in self.of(MqttConnected)))

    async def messages(self, count: int) -> list[MqttMessage]:
        return await self.activity.until(lambda: self.of(MqttMessage) if len(self.of(MqttMessage)) >= count else [])


@asynccontextmanager
async def tapped(url: str, *filters: str, **settings: Any) -> AsyncIterator[Tap]:
    """A connected link; when it is left, neither task nor socket is."""
    before = asyncio.all_tasks()
    tap = Tap(url, *filters, **settings)
    async with tap.link:
        await tap.until_connected()
        yield tap
    assert {task for task in asyncio.all_tasks() - before if "ScriptedBroker" not in repr(task)} == set()
    assert not tap.link.connected


async def some_will() -> Will:
    return Will("test/will", b"gone")

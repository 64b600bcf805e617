"""A device that has stored things, at a real broker: it sends them to a gateway, and hears what became of them."""

from __future__ import annotations

import asyncio
from typing import Self

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tidegate.fleet.stored import DeferredAnswer, Forwarded, Inquiry, decode_receipt, encode_stored
from tidegate.fleet.topics import DEFAULT_FLEET, StoredTopic, Topics

MESSAGE = Forwarded | Inquiry


class StoredDevice:
    """`async with` connects it. `taken`: ids, by the gateway that has acknowledged each first; `answers`: by id."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.taken: dict[str, str] = {}
        self.receipts: list[tuple[str, str]] = []  # (gateway, id), also of what was acknowledged before
        self.unknown: dict[str, str] = {}
        self.answers: dict[str, DeferredAnswer] = {}
        self._topics = Topics(DEFAULT_FLEET)
        self._port = port
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id=f"stored~{name}")
        self._subscribed = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._client.on_message = lambda _c, _u, message: loop.call_soon_threadsafe(self._heard, message.payload)
        self._client.on_connect = lambda *_: self._client.subscribe(self._topics.receipt(self.name), 1)
        self._client.on_subscribe = lambda *_: loop.call_soon_threadsafe(self._subscribed.set)
        self._client.connect("127.0.0.1", self._port)
        self._client.loop_start()
        await asyncio.wait_for(self._subscribed.wait(), 20.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _heard(self, payload: bytes) -> None:
        receipt = decode_receipt(payload)
        for id in receipt.taken:
            self.taken.setdefault(id, receipt.gateway)
            self.receipts.append((receipt.gateway, id))
        self.unknown |= dict.fromkeys(receipt.unknown, receipt.gateway)
        self.answers |= {one.id: one for one in receipt.answers}

    def send(self, gateway: str, message: MESSAGE) -> None:
        event = isinstance(message, Forwarded) and message.kind == "event"
        topic = self._topics.stored(self.name, StoredTopic.EVENT if event else StoredTopic.RESULT, gateway)
        self._client.publish(topic, encode_stored(message), qos=1)

    def store(self, number: int, kind: str, body: bytes) -> Forwarded:
        return Forwarded(self.name, f"{number:032x}", kind, 0, body, model="echo", version="3", variant="int8")  # type: ignore[arg-type]

    def ask(self, gateway: str, *ids: str) -> None:
        self.send(gateway, Inquiry(self.name, ids))

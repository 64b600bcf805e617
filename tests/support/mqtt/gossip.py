"""Somebody on the broker who hears everything and says it again: late, twice, out of order, or of somebody else."""

from __future__ import annotations

from typing import NamedTuple

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion


class Heard(NamedTuple):
    topic: str
    payload: bytes
    retain: bool


class Gossip:
    """Connected from the start until `close`. `heard` is everything so far, oldest first."""

    def __init__(self, port: int) -> None:
        self.heard: list[Heard] = []
        self._client = Client(CallbackAPIVersion.VERSION2, client_id="gossip")
        self._client.on_message = self._hear
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()

    def listen(self, topics: str) -> None:
        self._client.subscribe(topics, qos=1)

    def say(self, what: Heard) -> None:
        self._client.publish(what.topic, what.payload, qos=1, retain=what.retain)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _hear(self, _client: Client, _userdata: object, message: MQTTMessage) -> None:
        self.heard.append(Heard(message.topic, message.payload, message.retain))

    def __repr__(self) -> str:
        return f"<Gossip heard {len(self.heard)}>"

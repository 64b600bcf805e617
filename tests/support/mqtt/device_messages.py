"""Devices as a fleet test needs them: what one would say over MQTT, with its own clock, as (topic, payload) pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.fleet_sync.registry import FleetRegister
from tidegate.fleet.messages import Birth, Death, Heartbeat, Inventory, UpMessage, encode, inventory_hash
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.fleet.reported import ModelReport, Reported
from tidegate.fleet.topics import DeviceTopic, Topics

TOPICS = Topics("f1")
_KIND = {
    Birth: DeviceTopic.BIRTH,
    Death: DeviceTopic.DEATH,
    Heartbeat: DeviceTopic.HEARTBEAT,
    Inventory: DeviceTopic.INVENTORY,
    Reported: DeviceTopic.REPORTED,
}

Spoken = tuple[str, bytes]


def offer(name: str = "digits", version: str = "1", state: Any = "ready") -> ModelOffer:
    return ModelOffer(name, version, (VariantOffer("int8", "int8", cost=((1.0, 0.002), (64.0, 0.011))),), state=state)


def spoken(message: UpMessage, topics: Topics = TOPICS) -> Spoken:
    return topics.up(message.device, _KIND[type(message)]), encode(message)


@dataclass
class Device:
    """Says things in order; its milliseconds run with `now` less an offset that nobody else knows."""

    name: str = "kiosk-1"
    epoch: int = 100
    boot: str = "boot-a"
    clock_offset_s: float = 5000.0
    interval_ms: int = 1000
    offers: tuple[ModelOffer, ...] = field(default_factory=lambda: (offer(),))
    urls: tuple[str, ...] = ("10.0.0.7:9001",)
    revision: int = 1
    _sequences: dict[tuple[int, DeviceTopic], int] = field(default_factory=dict)

    def birth(self, now: float, **changes: Any) -> Spoken:
        return spoken(self.birth_message(now, **changes))

    def birth_message(self, now: float, **changes: Any) -> Birth:
        fields: dict[str, Any] = {
            "device": self.name, "epoch": self.epoch, "sequence": self._next(DeviceTopic.BIRTH), "mono_ms":
            self._mono_ms(now), "boot": self.boot, "urls": self.urls, "offers": self.offers, "revision": self.revision,
            "interval_ms": self.interval_ms,
        }  # fmt: skip
        return Birth(**(fields | changes))

    def heartbeat(self, now: float, **changes: Any) -> Spoken:
        return spoken(self.heartbeat_message(now, **changes))

    def heartbeat_message(self, now: float, **changes: Any) -> Heartbeat:
        fields: dict[str, Any] = {
            "device": self.name, "epoch": self.epoch, "sequence": self._next(DeviceTopic.HEARTBEAT),
            "mono_ms": self._mono_ms(now), "interval_ms": self.interval_ms, "inventory": inventory_hash(self.offers),
        }  # fmt: skip
        return Heartbeat(**(fields | changes))

    def inventory(self, now: float, *offers: ModelOffer) -> Spoken:
        """From now on the device offers these."""
        self.offers = offers
        self.revision += 1
        sequence = self._next(DeviceTopic.INVENTORY)
        return spoken(Inventory(self.name, self.epoch, sequence, self._mono_ms(now), self.offers, self.revision))

    def reported(self, now: float, *models: ModelReport) -> Spoken:
        """How its rollouts are."""
        return spoken(
            Reported(self.name, self.epoch, self._next(DeviceTopic.REPORTED), self._mono_ms(now), models=models)
        )

    def will(self) -> Spoken:
        return spoken(Death(self.name, self.epoch, "lost"))

    def goodbye(self, reason: Any = "shutdown") -> Spoken:
        return spoken(Death(self.name, self.epoch, reason))

    def _next(self, kind: DeviceTopic) -> int:
        self._sequences[self.epoch, kind] = self._sequences.get((self.epoch, kind), 0) + 1
        return self._sequences[self.epoch, kind]

    def _mono_ms(self, now: float) -> int:
        return round((now + self.clock_offset_s) * 1000)


def register(**changes: Any) -> FleetRegister:
    settings: dict[str, Any] = {"draw": lambda: 0.5}
    return FleetRegister(TOPICS, **(settings | changes))

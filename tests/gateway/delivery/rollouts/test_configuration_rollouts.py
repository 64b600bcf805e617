"""Settings on their way through the gateway: staged, remembered over a kill, compared, and sent again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway.core.versions.canary import RolloutPhase
from gateway.delivery.artifacts.store import ArtifactStore
from gateway.delivery.rollouts.coordinator import RolloutController
from gateway.delivery.rollouts.order import decode_order
from gateway.fleet_sync.freshness import DeviceView, Freshness
from tests.support.edge.rollouts import eventually
from tidegate import clock
from tidegate.fleet.reported import ConfigurationReport, Reported, RolloutState, SettingDifference
from tidegate.rollout.desired import DesiredConfiguration, DesiredDocument
from tidegate.rollout.device_settings import Setting, settings_digest
from tidegate.rollout.signing import verify_document
from tidegate.tools.delivery.configuration_order import ConfigurationTerms, make_configuration_order
from tidegate.tools.delivery.order import ListedDevice, OrderSigning

pytestmark = pytest.mark.slow
SIGNING = OrderSigning([Ed25519PrivateKey.generate()])
NAMES = ("kiosk-1", "kiosk-2")
SETTINGS: dict[str, Setting] = {"nice": 3}


class Broker:
    """A `DeviceChannel` whose devices report what a test has them report."""

    def __init__(self) -> None:
        self.session = 1
        self.published: list[tuple[str, DesiredDocument]] = []
        self.reports: dict[str, Reported | None] = dict.fromkeys(NAMES)

    def publish_desired(self, device: str, message: bytes) -> bool:
        self.published.append((device, verify_document(message, SIGNING.trusted)[0]))
        return True

    def devices(self, now: float) -> tuple[DeviceView, ...]:
        return tuple(
            DeviceView(name, 1, (), (), None, Freshness.FRESH, 0.0, "", reported=one)
            for name, one in self.reports.items()
        )

    def has(self, name: str) -> bool:
        """Whether the device has been asked for anything."""
        return name in {one for one, _ in self.published}

    def report(self, name: str, state: str, *, revision: int = 1, nice: int = 3) -> None:
        differs = () if nice == 3 else (SettingDifference("nice", nice, "hand"),)
        said = ConfigurationReport(
            RolloutState(state), "0", "why" if state == "rolled_back" else "", f"device/{name}", revision,
            settings_digest({"nice": nice}), differs,
        )  # fmt: skip
        self.reports[name] = Reported(name, 1, 1, 0, accepted={f"device/{name}": revision}, configuration=said)


class NobodyPreferred:
    async def rolled_out(self, model: str, version: str) -> None:
        raise AssertionError("settings are no version")

    recalled = rolled_out


def controller(folder: Path, broker: Broker) -> RolloutController:
    return RolloutController(ArtifactStore(folder), broker, lambda _: None, NobodyPreferred(), lambda _: {})


def order() -> bytes:
    spec = {"id": "configuration-kiosks-1", "waves": (0.5, 1.0), "success_ratio": 1.0, "max_errors": 0}
    terms = ConfigurationTerms(DesiredConfiguration(SETTINGS, local="undo"), 1, 2_000_000_000)
    return make_configuration_order(spec, [ListedDevice(name, "fresh", 0) for name in NAMES], terms, SIGNING)


async def until(rollouts: RolloutController, true: Callable[[], bool]) -> None:
    def looked() -> bool:
        rollouts.fleet_changed()
        return true()

    await eventually(looked, say=lambda: rollouts)


async def test_settings_are_staged_over_a_kill_of_the_gateway(tmp_path: Path) -> None:
    broker = Broker()
    async with controller(tmp_path, broker) as rollouts:
        await rollouts.begin(decode_order(order()))
        await until(rollouts, lambda: [name for name, _ in broker.published] == ["kiosk-1"])
    broker.session, broker.published = 2, []
    async with controller(tmp_path, broker) as rollouts:
        broker.report("kiosk-1", "committed")
        await until(rollouts, lambda: {name for name, _ in broker.published} == set(NAMES))
        broker.report("kiosk-2", "committed")
        waves = rollouts.all["configuration-kiosks-1"]
        await until(rollouts, lambda: waves.state.phase is RolloutPhase.SUCCEEDED)


async def test_a_device_that_goes_back_calls_all_back_with_the_documents_before(tmp_path: Path) -> None:
    broker = Broker()
    async with controller(tmp_path, broker) as rollouts:
        await rollouts.begin(decode_order(order()))
        await until(rollouts, lambda: broker.published != [])
        broker.report("kiosk-1", "rolled_back")
        await until(rollouts, lambda: len(broker.published) == 2)
        name, document = broker.published[1]
        assert (name, document.revision, document.configuration) == ("kiosk-1", 2, DesiredConfiguration())
        broker.report("kiosk-1", "committed", revision=2)
        waves = rollouts.all["configuration-kiosks-1"]
        await until(rollouts, lambda: waves.state.phase is RolloutPhase.RETURNED)
        assert "kiosk-1: why" in waves.state.reason


async def test_drift_is_noticed_and_the_document_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("coordinator.SETTLE_S", "coordinator.TICK_S", "coordinator.IDLE_S"):
        monkeypatch.setattr(f"gateway.delivery.rollouts.{name}", 0.02)
    monkeypatch.setattr("gateway.core.versions.configuration_drift.REPAIR_S", 0.1)
    monkeypatch.setattr("gateway.core.versions.configuration_drift.HOLD_S", 0.0)
    broker = Broker()
    async with controller(tmp_path, broker) as rollouts:
        await rollouts.begin(decode_order(order()))
        for name in NAMES:
            await until(rollouts, partial(broker.has, name))
            broker.report(name, "committed")
        await until(rollouts, lambda: rollouts.drift.counts()["in_sync"] == 2)
        assert rollouts.drift.standing(clock.now()) == []

        broker.report("kiosk-2", "committed", nice=9)
        await until(rollouts, lambda: broker.published.count(broker.published[-1]) > 1)
        assert broker.published[-1][0] == "kiosk-2"
        ((device, _, evidence),) = rollouts.drift.standing(clock.now())
        assert (device, evidence) == ("kiosk-2", "drifted: by hand: nice is 9 instead of 3")
        broker.report("kiosk-2", "committed")
        await until(rollouts, lambda: rollouts.drift.counts()["in_sync"] == 2)

"""An edge is discovered by its fleet without configuration, and reports a lost worker and its own end."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.fleet_sync.freshness import DeviceView, Freshness
from gateway.fleet_sync.sync import FleetSync
from tests.support.models.tiny_models import tiny_repository
from tests.support.mqtt.brokers import Embedded, Signal
from tidegate import clock
from tidegate.config import load

pytestmark = pytest.mark.slow


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Embedded]:
    with Embedded(tmp_path) as one:
        yield one


@pytest.fixture
def config(broker: Embedded, tmp_path: Path) -> EdgeConfig:
    return load(
        EdgeConfig,
        name="kiosk-1",
        grpc_port=0,
        http_port=None,
        model_repository=tiny_repository(tmp_path / "models"),
        models=["double"],
        mqtt=broker.url,
        fleet="f1",
        state_dir=tmp_path / "state",
        warmup_budget_s=0.5,
    )


class Gateway:
    """What a gateway sees of the one device of its fleet."""

    def __init__(self, url: str) -> None:
        self.changed = Signal()
        self.sync = FleetSync(url, "f1", "main", self.changed, lambda: 0.1)

    def kiosk(self) -> DeviceView | None:
        devices = self.sync.register.devices(clock.now())
        return devices[0] if devices else None

    async def sees(self, state: str) -> DeviceView:
        """Wait until the device offers its model in that state."""

        def look() -> DeviceView | None:
            kiosk = self.kiosk()
            return kiosk if kiosk is not None and kiosk.offers and kiosk.offers[0].state == state else None

        return await self.changed.until(look)


@pytest.fixture
async def gateway(broker: Embedded) -> AsyncIterator[Gateway]:
    one = Gateway(broker.url)
    async with one.sync:
        yield one


async def test_a_gateway_finds_the_edge_hears_of_its_worker_and_of_its_leaving(
    config: EdgeConfig, gateway: Gateway
) -> None:
    async with EdgeApp(config, draw=lambda: 0.5) as app:
        born = await gateway.sees("ready")
        assert (born.name, born.urls) == ("kiosk-1", (app.addresses["grpc"],))
        assert born.offers == app.host.offers()
        assert born.epoch == app.host.load_report().epoch

        (worker,) = [child for child in psutil.Process().children() if "tidegate.workers.child" in child.cmdline()]
        worker.send_signal(signal.SIGKILL)

        await gateway.sees("loading")
        back = await gateway.sees("ready")
        assert back.epoch == born.epoch

    def leaving() -> str | None:
        kiosk = gateway.kiosk()
        return kiosk.reason if kiosk is not None and kiosk.freshness is Freshness.DEAD else None

    assert "shutdown" in await gateway.changed.until(leaving)


async def test_the_reason_to_leave_is_what_was_written_before_the_stop(config: EdgeConfig, gateway: Gateway) -> None:
    config.state_dir.mkdir(parents=True, exist_ok=True)
    left_over = config.state_dir / "leaving"
    left_over.write_text("sleep")  # of a stop that never was one
    async with EdgeApp(config, draw=lambda: 0.5):
        await gateway.sees("ready")
        assert not left_over.exists()
        left_over.write_text("update\n")

    def leaving() -> str | None:
        kiosk = gateway.kiosk()
        return kiosk.reason if kiosk is not None and kiosk.freshness is Freshness.DEAD else None

    assert "update" in await gateway.changed.until(leaving)
    assert not left_over.exists()


async def test_an_edge_serves_without_its_broker_and_tells_an_address_that_is_not_its_own_when_asked(
    config: EdgeConfig, broker: Embedded, gateway: Gateway
) -> None:
    broker.kill()
    elsewhere = config.model_copy(update={"advertise": "kiosk.lan:9001"})
    async with EdgeApp(elsewhere, draw=lambda: 0.01) as app:
        assert app.host.ready()

        broker.start()

        assert (await gateway.sees("ready")).urls == ("kiosk.lan:9001",)

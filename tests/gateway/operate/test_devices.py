"""Devices of a whole gateway: they become targets by MQTT and the link, and only at addresses that are allowed."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.fleet_sync.freshness import DeviceView, Freshness
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, until
from tests.support.mqtt.device_messages import Device, register
from tidegate import clock
from tidegate.types import LoadReport

pytestmark = pytest.mark.slow


class FakeRegister:
    """What MQTT would have told."""

    def __init__(self) -> None:
        self.views: tuple[DeviceView, ...] = ()
        self.evidence: list[str] = []

    def devices(self, now: float) -> tuple[DeviceView, ...]:
        return self.views

    def changed(self, now: float, most: int) -> list[tuple[str, DeviceView | None]]:
        return [(view.name, view) for view in self.views]

    def view(self, name: str, now: float) -> DeviceView | None:
        return next((view for view in self.views if view.name == name), None)

    def data_plane(self, name: str, epoch: int, sequence: int, load: LoadReport | None, now: float) -> bool:
        self.evidence.append(f"{name} answered")
        return True

    def data_plane_alive(self, name: str, now: float) -> bool:
        self.evidence.append(f"{name} lives")
        return True

    def data_plane_lost(self, name: str, now: float) -> bool:
        self.evidence.append(f"{name} lost")
        return True


def device(far: Far, freshness: Freshness = Freshness.FRESH) -> DeviceView:
    name = far.name.partition("/")[2]
    reason = "" if freshness is Freshness.FRESH else "no heartbeat"
    return DeviceView(
        name,
        epoch=1,
        urls=(f"grpc://{far.address}",),
        offers=far.offers,
        load=None,
        freshness=freshness,
        age_s=0.1,
        reason=reason,
    )


def attic(far: Far) -> DeviceView:
    """A fresh device called attic at the address of `far`."""
    return DeviceView(
        "attic",
        epoch=1,
        urls=(far.address,),
        offers=far.offers,
        load=None,
        freshness=Freshness.FRESH,
        age_s=0.1,
        reason="",
    )


async def test_the_last_device_that_an_operator_deletes_is_a_target_no_more(tmp_path: Path) -> None:
    """A register without devices still has news: that the last one was forgotten."""
    async with gateway_for(configured(tmp_path)) as (gateway, _):
        gateway.directory.register = fleet = register()
        gone = Device("attic", urls=("127.0.0.1:9",))  # never up: a target that answers stays, whatever MQTT says
        topic, _ = birth = gone.birth(clock.now())
        fleet.fold(*birth, clock.now())
        gateway.directory.devices_changed()
        await until(lambda: "edge/attic" in gateway.fleet.targets)

        fleet.fold(topic, b"", clock.now())
        assert len(fleet) == 0
        gateway.directory.devices_changed()
        await until(lambda: "edge/attic" not in gateway.fleet.targets, 10.0)


@pytest.mark.parametrize("transport", ["link", "unary"])
async def test_devices_come_and_go_with_mqtt_and_the_link(tmp_path: Path, transport: str) -> None:
    edge = Far("edge/attic")
    async with running(edge), AsyncExitStack() as stack:
        config = configured(tmp_path, edge_transport=transport)
        gateway, session = await stack.enter_async_context(gateway_for(config))
        register = FakeRegister()
        gateway.directory.register = register
        assert (await ask(gateway, session))[0] == 503

        register.views = (device(edge),)
        gateway.directory.devices_changed()
        await until(lambda: gateway.host.model_ready("echo"))
        assert (await ask(gateway, session))[2]["tidegate-served-by"] == "edge/attic"
        assert "attic answered" in register.evidence

        # Its broker is gone, but its link works: it stays in use.
        register.views = (device(edge, Freshness.DEAD),)
        gateway.directory.devices_changed()
        await clock.sleep(0.05)
        assert (await ask(gateway, session))[0] == 200

        await edge.kill()
        await until(lambda: "attic lost" in register.evidence)
        gateway.directory.devices_changed()
        await until(lambda: not gateway.fleet.targets)
        assert (await ask(gateway, session))[0] == 503


async def test_a_process_that_answers_under_another_name_is_not_used(tmp_path: Path) -> None:
    impostor = Far("edge/cellar")
    async with running(impostor), AsyncExitStack() as stack:
        gateway, _ = await stack.enter_async_context(gateway_for(configured(tmp_path)))
        register = FakeRegister()
        gateway.directory.register = register
        register.views = (attic(impostor),)
        gateway.directory.devices_changed()

        await until(lambda: "edge/attic" in gateway.fleet.targets and gateway.fleet.targets["edge/attic"].tried)

        assert "is edge/cellar" in gateway.fleet.targets["edge/attic"].state(clock.now())[1]

        # What it goes on to say, such as its load with every heartbeat, is no sign of life of the device that is gone.
        register.evidence.clear()
        assert impostor.link is not None
        for _ in range(3):
            impostor.link.announce()
            await clock.sleep(0.1)
        assert register.evidence == []


async def test_a_device_that_advertises_an_address_elsewhere_is_not_dialled_and_operators_see_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = Far("edge/attic")
    async with running(far), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, advertised_networks=("10.0.0.0/8",)))
        )
        register = FakeRegister()
        gateway.directory.register = register
        register.views = (attic(far),)
        for _ in range(2):
            gateway.directory.devices_changed()
            await until(lambda: "attic" in gateway.directory.refused)

        async with session.get(gateway.addresses["admin"] + "/v1/state") as response:
            state = await response.json()

        assert gateway.directory.targets == {}
        reason = "127.0.0.1 is in no network of advertised_networks"
        assert state["refused"] == [{"device": "attic", "reason": reason}]
        assert capsys.readouterr().out.count("advertises an address that is not allowed") <= 1

"""`deploy/` works as it is: units that systemd takes, profiles that the processes take, an ACL that holds."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from tidegate import clock
from tidegate.config import load
from tidegate.config_cli import config_model

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin"
MOSQUITTO = shutil.which("mosquitto", path=SEARCH)
PROFILES = {"device": "edge", "site": "gateway", "cloud": "pool"}
pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.mark.parametrize(("profile", "role"), PROFILES.items())
def test_a_profile_is_a_valid_configuration_of_its_process(
    profile: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in [key for key in os.environ if key.startswith("TIDEGATE_")]:
        monkeypatch.delenv(key)
    load(config_model(role), DEPLOY / "config" / f"{profile}.yaml")


def test_there_is_a_profile_for_each_unit_and_a_unit_for_each_profile() -> None:
    for profile, role in PROFILES.items():
        unit = (DEPLOY / "systemd" / f"tidegate-{role}.service").read_text()
        assert f"tidegate {role} --config /etc/tidegate/{profile}.yaml" in unit
    assert len(list((DEPLOY / "systemd").glob("*.service"))) == len(list((DEPLOY / "config").glob("*.yaml"))) == 3


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.stem)
def test_systemd_takes_each_unit_without_a_word(unit: Path, tmp_path: Path) -> None:
    # The only change: the program is looked for where this environment has it.
    installed = tmp_path / unit.name
    program = str(Path(sys.executable).parent / "tidegate")
    installed.write_text(unit.read_text().replace("/opt/tidegate/bin/tidegate", program))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(installed)], capture_output=True, text=True, check=False
    )
    # an unknown key is only a word on stderr, with exit code 0
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.fixture
async def broker_port(tmp_path: Path) -> AsyncIterator[int]:
    """Mosquitto with the deployed configuration, its paths and its port moved."""
    if MOSQUITTO is None:
        pytest.skip("Mosquitto is not installed here")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    passwords = tmp_path / "passwd"
    passwords.write_text("".join(f"{user}:secret of {user}\n" for user in ("gw", "device-1", "device-2")))
    await (
        await asyncio.create_subprocess_exec("mosquitto_passwd", "-U", str(passwords))
    ).wait()  # hashes them in place
    config = (DEPLOY / "mosquitto" / "mosquitto.conf").read_text()
    config = config.replace("listener 1883", f"listener {port} 127.0.0.1").replace(
        "/var/lib/mosquitto/", f"{tmp_path}/"
    )
    config = config.replace("/etc/mosquitto/tidegate.passwd", str(passwords))
    config = config.replace("/etc/mosquitto/tidegate.acl", str(DEPLOY / "mosquitto" / "tidegate.acl"))
    file = tmp_path / "mosquitto.conf"
    file.write_text(config + ("user root\n" if os.geteuid() == 0 else ""))
    process = await asyncio.create_subprocess_exec(MOSQUITTO, "-c", str(file), stderr=asyncio.subprocess.DEVNULL)
    try:
        await answers(port)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def answers(port: int) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await clock.sleep(0.02)
            else:
                writer.close()
                await writer.wait_closed()
                return


class Client:
    """An MQTT 5 client, which is told of a denial (MQTT 3.1.1 is answered with success)."""

    def __init__(self, port: int, user: str) -> None:
        self.received: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[bool] = asyncio.Queue()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=user, protocol=mqtt.MQTTv5)
        self._client.username_pw_set(user, f"secret of {user}")
        self._client.on_connect = lambda *args: self._answer(args[3])
        self._client.on_publish = lambda *args: self._answer(args[3])
        self._client.on_subscribe = lambda *args: self._answer(args[3][0])
        self._client.on_message = lambda *args: self.received.append(args[2].topic)
        self._port = port

    def _answer(self, reason: ReasonCode) -> None:
        self._loop.call_soon_threadsafe(self._answers.put_nowait, not reason.is_failure)

    async def __aenter__(self) -> Client:
        self._client.connect("127.0.0.1", self._port)
        self._client.loop_start()
        assert await self._allowed()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    async def may_write(self, topic: str) -> bool:
        self._client.publish(topic, b"{}", qos=1)
        return await self._allowed()

    async def subscribe(self, topic: str) -> None:
        self._client.subscribe(topic, qos=1)
        await self._allowed()

    async def _allowed(self) -> bool:
        async with asyncio.timeout(10):
            return await self._answers.get()


ROOT = "tidegate/v1/site"


async def test_a_device_writes_only_in_its_own_name(broker_port: int) -> None:
    async with Client(broker_port, "device-1") as device:
        assert await device.may_write(f"{ROOT}/up/device-1/birth")
        assert not await device.may_write(f"{ROOT}/up/device-2/birth")
        assert not await device.may_write(f"{ROOT}/down/device-2/cmd")
        assert not await device.may_write(f"{ROOT}/gw/gw/state")
        assert not await device.may_write("tidegate/v1/other/up/device-1/birth")


async def test_a_gateway_commands_devices_and_cannot_speak_as_one(broker_port: int) -> None:
    async with Client(broker_port, "gw") as gateway:
        assert await gateway.may_write(f"{ROOT}/down/device-1/cmd")
        assert await gateway.may_write(f"{ROOT}/gw/gw/state")
        assert not await gateway.may_write(f"{ROOT}/up/device-1/birth")
        assert not await gateway.may_write(f"{ROOT}/gw/other/state")


async def test_a_device_hears_gateways_and_its_own_commands_but_no_other_device(broker_port: int) -> None:
    async with Client(broker_port, "device-1") as curious, Client(broker_port, "device-2") as other:
        await curious.subscribe(f"{ROOT}/#")
        async with Client(broker_port, "gw") as gateway:
            assert await other.may_write(f"{ROOT}/up/device-2/birth")
            assert await gateway.may_write(f"{ROOT}/down/device-2/cmd")
            assert await gateway.may_write(f"{ROOT}/gw/gw/state")
            assert await gateway.may_write(f"{ROOT}/down/device-1/cmd")
            async with asyncio.timeout(10):
                while f"{ROOT}/down/device-1/cmd" not in curious.received:
                    await clock.sleep(0.01)
    assert curious.received == [f"{ROOT}/gw/gw/state", f"{ROOT}/down/device-1/cmd"]

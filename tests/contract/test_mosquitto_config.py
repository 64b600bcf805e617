"""The files that `tidegate broker config` writes, tried on a real Mosquitto over TLS by devices that misbehave."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from click.testing import CliRunner
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode
from structlog.testing import capture_logs

from edge_agent.app import EdgeApp
from edge_agent.commands.doctor import run_checks
from edge_agent.config import EdgeConfig
from edge_agent.core.reporting import AgentState
from edge_agent.fleet.epoch import EpochStore
from edge_agent.fleet.sync import EdgeSync
from gateway.commands.status import status
from gateway.fleet_sync.freshness import Freshness
from gateway.fleet_sync.sync import FleetSync
from tests.support.certificates import FleetPki
from tests.support.gateway.app import configured, gateway_for, repository
from tests.support.gateway.processes import GatewayProcesses
from tests.support.models.tiny_models import tiny_repository
from tests.support.mqtt.brokers import MOSQUITTO, Mosquitto
from tidegate import clock
from tidegate.fleet.messages import GatewayState, encode
from tidegate.mqtt.link import LinkEvent, MqttConnected, MqttLink
from tidegate.rollout.signing import MAX_SIGNED_BYTES
from tidegate.storage.file_owner import FileOwner
from tidegate.testing.ports import free_port
from tidegate.tools.broker.cli import CONF, PASSWD, broker, copy_certificate, write
from tidegate.tools.broker.mosquitto_config import MosquittoPlan, Users, gateway_user, passwd_line, passwd_text
from tidegate.types import LoadReport

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="the Mosquitto broker is not installed"),
]

FLEET = "f1"
ROOT = f"tidegate/v1/{FLEET}"
NAMES = (gateway_user("main"), "device-1", "device-2")


class Fleet(Mosquitto):
    """Mosquitto as the generator configures it, with users of either kind."""

    def __init__(self, folder: Path, users: Users) -> None:
        super().__init__(folder)
        self.users = users
        self.pki = FleetPki(folder / "pki")
        self.pki.issue("broker/main")
        plan = MosquittoPlan(FLEET, ("main",), folder, users, port=self.port, address="127.0.0.1")
        self.plan = replace(plan, data_dir=None, run_as="root" if os.geteuid() == 0 else None)
        self.passwords = write(self.plan, folder, NAMES if users == "passwords" else ())
        copy_certificate(self.pki.store, folder)

    def command(self) -> list[str]:
        assert MOSQUITTO is not None
        return [MOSQUITTO, "-c", str(self._folder / CONF)]

    def address(self, user: str) -> str:
        """As an agent would have it in its configuration."""
        who = f"{user}:{self.passwords[user]}@" if self.users == "passwords" else ""
        return f"mqtts://{who}localhost:{self.port}"

    def context(self, user: str) -> ssl.SSLContext:
        if self.users == "passwords":
            return self.pki.client()
        return self.pki.client("gateway/main" if user == NAMES[0] else f"edge/{user}")

    def client(self, user: str, *, id: str = "") -> Client:
        found = Client(self.port, id or user, self.context(user))
        if self.users == "passwords":
            found.client.username_pw_set(user, self.passwords[user])
        return found


class Client:
    """An MQTT 5 client, which is told of a denial (MQTT 3.1.1 is answered with success)."""

    def __init__(self, port: int, id: str, context: ssl.SSLContext) -> None:
        self.received: list[str] = []
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=id, protocol=mqtt.MQTTv5)
        self.client.tls_set_context(context)
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[bool] = asyncio.Queue()
        self.client.on_connect = lambda *args: self._answer(args[3])
        self.client.on_publish = lambda *args: self._answer(args[3])
        self.client.on_subscribe = lambda *args: self._answer(args[3][0])
        self.client.on_message = lambda *args: self.received.append(args[2].topic)
        self._port = port

    def _answer(self, reason: ReasonCode) -> None:
        self._loop.call_soon_threadsafe(self._answers.put_nowait, not reason.is_failure)

    async def connect(self) -> bool:
        self.client.connect("localhost", self._port)
        self.client.loop_start()
        return await self._allowed()

    async def __aenter__(self) -> Client:
        assert await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    async def may_write(self, topic: str, payload: bytes = b"{}", *, retain: bool = False) -> bool:
        self.client.publish(topic, payload, qos=1, retain=retain)
        return await self._allowed()

    async def subscribe(self, topic: str) -> None:
        self.client.subscribe(topic, qos=1)
        await self._allowed()

    async def _allowed(self) -> bool:
        async with asyncio.timeout(10):
            return await self._answers.get()


@pytest.fixture(scope="module", params=["certificates", "passwords"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    with Fleet(tmp_path_factory.mktemp("mosquitto"), request.param) as started:
        yield started  # type: ignore[misc]


async def test_a_device_writes_only_in_its_own_name(fleet: Fleet) -> None:
    async with fleet.client("device-1") as device:
        assert await device.may_write(f"{ROOT}/up/device-1/birth")
        assert not await device.may_write(f"{ROOT}/up/device-2/birth")
        assert not await device.may_write(f"{ROOT}/down/device-1/cmd")
        assert not await device.may_write(f"{ROOT}/down/device-2/cmd")
        assert not await device.may_write(f"{ROOT}/gw/main/state")
        assert not await device.may_write("tidegate/v1/other/up/device-1/birth")


async def test_a_device_writes_what_there_is_to_say_and_fills_the_broker_with_nothing_else(fleet: Fleet) -> None:
    async with fleet.client("device-1") as device:
        for last in ("birth", "death", "hb", "inv", "reported", "probe", "evt/main", "res/main"):
            assert await device.may_write(f"{ROOT}/up/device-1/{last}"), last
        for last in ("x1", "birth/x1", "evt/x1", "res/main/x1", "evt"):
            assert not await device.may_write(f"{ROOT}/up/device-1/{last}", b"x" * 100_000, retain=True), last


async def test_a_device_reads_its_own_desired_state_and_what_gateways_say_and_nobody_elses(fleet: Fleet) -> None:
    async with fleet.client("device-1") as curious, fleet.client("device-2") as other:
        for topic in (f"{ROOT}/#", f"{ROOT}/down/device-2/#", f"{ROOT}/up/device-2/#"):
            await curious.subscribe(topic)
        async with fleet.client(NAMES[0]) as gateway:
            assert await other.may_write(f"{ROOT}/up/device-2/birth")
            assert await gateway.may_write(f"{ROOT}/down/device-2/desired")
            assert await gateway.may_write(f"{ROOT}/gw/main/state")
            assert await gateway.may_write(f"{ROOT}/down/device-1/desired")
            async with asyncio.timeout(10):
                while f"{ROOT}/down/device-1/desired" not in curious.received:
                    await clock.sleep(0.01)
    assert set(curious.received) == {f"{ROOT}/gw/main/state", f"{ROOT}/down/device-1/desired"}


async def test_the_longest_document_there_is_reaches_the_devices_of_a_group(fleet: Fleet) -> None:
    topic = f"{ROOT}/down/g/kiosks/desired"
    async with fleet.client("device-1") as device, fleet.client(NAMES[0]) as gateway:
        await device.subscribe(topic)
        assert await gateway.may_write(topic, bytes(MAX_SIGNED_BYTES))
        async with asyncio.timeout(10):
            while topic not in device.received:
                await clock.sleep(0.01)
        assert not await device.may_write(topic)


async def test_a_gateway_commands_devices_and_cannot_speak_as_one(fleet: Fleet) -> None:
    async with fleet.client(NAMES[0]) as gateway:
        assert await gateway.may_write(f"{ROOT}/down/device-1/cmd")
        assert await gateway.may_write(f"{ROOT}/gw/main/state")
        assert not await gateway.may_write(f"{ROOT}/up/device-1/birth")
        assert not await gateway.may_write(f"{ROOT}/gw/other/state")


async def test_a_device_cannot_end_another_ones_session_by_taking_its_client_id(fleet: Fleet) -> None:
    async with fleet.client("device-1") as device, fleet.client("device-2", id="device-1"):
        assert await device.may_write(f"{ROOT}/up/device-1/birth")


async def test_an_agent_and_a_gateway_find_each_other_over_tls_and_the_acl_is_found_good(
    fleet: Fleet, tmp_path: Path
) -> None:
    state = AgentState((), ("10.0.0.7:9001",), LoadReport(1, 1, 0, 0, 0.0))
    heard = asyncio.Event()
    contexts = {user: lambda user=user: fleet.context(user) for user in NAMES}  # type: ignore[misc]
    agent = EdgeSync(
        fleet.address("device-1"),
        fleet=FLEET,
        device="device-1",
        state=lambda: state,
        epochs=EpochStore(tmp_path / "epoch"),
        draw=lambda: 0.5,
        interval_s=0.1,
        tls=contexts["device-1"],
    )
    gateway = FleetSync(fleet.address(NAMES[0]), FLEET, "main", heard.set, lambda: 0.5, tls=contexts[NAMES[0]])
    with capture_logs() as logs:
        async with gateway, agent, asyncio.timeout(15):
            while not [one for one in gateway.register.devices(clock.now()) if one.freshness is Freshness.FRESH]:
                heard.clear()
                await heard.wait()
            while len([one for one in logs if "lets this device speak as" in one["event"]]) < 2:
                await clock.sleep(0.01)
    assert [one for one in logs if one["log_level"] in ("warning", "error")] == []


@pytest.mark.parametrize("fleet", ["certificates"], indirect=True)
async def test_a_gateway_in_several_processes_has_one_session_and_all_of_them_find_devices(
    fleet: Fleet, tmp_path: Path
) -> None:
    tls = {key: str(path) for key, path in fleet.pki.config("gateway/main").model_dump().items() if path}
    words = {"name": "main", "fleet": FLEET, "mqtt": fleet.address(NAMES[0]), "tls": tls}
    ended_before = fleet.said.count("already connected")
    async with (
        GatewayProcesses(tmp_path, model_repository=str(repository(tmp_path)), **words) as gateway,
        an_agent(fleet.address("device-1"), "device-1", tmp_path, lambda: fleet.context("device-1")),
        asyncio.timeout(60),
    ):
        while not all(found_by(gateway, f"worker-{number}") for number in (1, 2)):
            await clock.sleep(0.1)
    assert fleet.said.count("already connected") == ended_before, "one session ended another"
    assert "no broker" not in gateway.log.read_text()


def found_by(gateway: GatewayProcesses, process: str) -> bool:
    lines = gateway.log.read_text().splitlines()
    return any(process in line and "device-1" in line for line in lines)


async def test_a_device_under_a_wrong_name_is_told_at_its_start(fleet: Fleet, tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with an_agent(fleet.address("device-1"), "device-2", tmp_path, lambda: fleet.context("device-1")):
            await said(logs, "does not let this device speak as device-2")
    complaint = next(one for one in logs if "does not let" in one["event"])
    assert complaint["log_level"] == "error"
    assert "Not authorized" in complaint["event"] and "common name" in complaint["event"]


@pytest.mark.parametrize("fleet", ["certificates"], indirect=True)
async def test_the_doctor_names_both_fleets_where_a_devices_is_not_the_gateways(fleet: Fleet, tmp_path: Path) -> None:
    async with fleet.client(NAMES[0]) as gateway:
        state = encode(GatewayState("main", True, 1))
        assert await gateway.may_write(f"{ROOT}/gw/main/state", state, retain=True)
        config = EdgeConfig(
            name="device-1", fleet="demo", mqtt=fleet.address("device-1"), tls=fleet.pki.config("edge/device-1"),
            model_repository=tmp_path, state_dir=tmp_path, grpc_port=free_port(), http_port=None, dial_out="always",
        )  # fmt: skip
        found = {one.check: one for one in await run_checks(config)}
        assert await gateway.may_write(f"{ROOT}/gw/main/state", b"", retain=True)
    assert found["certificate"].verdict == "ok"
    assert "in the fleet demo" in found["broker"].words
    assert "fleet is demo" in found["fleet"].words and "gateway/main of the fleet f1" in found["fleet"].words
    assert "set `fleet: f1` here" in found["fleet"].advice


async def test_the_doctor_beside_a_running_agent_leaves_its_session_alone(fleet: Fleet, tmp_path: Path) -> None:
    config = EdgeConfig(
        name="device-1", fleet=FLEET, mqtt=fleet.address("device-1"), tls=fleet.pki.config("edge/device-1"),
        model_repository=tiny_repository(tmp_path / "models"), models=("double",), state_dir=tmp_path / "state",
        grpc_port=free_port(), http_port=free_port(), warmup_budget_s=0.5,
    )  # fmt: skip
    async with EdgeApp(config) as app, asyncio.timeout(60):
        while app.sync is None or not app.sync.connected:
            await clock.sleep(0.01)
        epoch, ended = app.sync.epoch, fleet.said.count("already connected")
        found = {one.check: one for one in await run_checks(config)}
        await clock.sleep(0.2)
        assert (app.sync.connected, app.sync.epoch) == (True, epoch)
        assert fleet.said.count("already connected") == ended
    assert (found["broker"].verdict, found["gateways"].verdict) == ("ok", "ok")
    assert "running agent" in found["broker"].words


@pytest.mark.parametrize(("in_fleet", "name"), [("demo", "main"), (FLEET, "other")])
async def test_a_gateway_that_the_access_list_does_not_know_is_told_by_name_and_fleet(
    fleet: Fleet, in_fleet: str, name: str
) -> None:
    tls = fleet.context(NAMES[0])
    gateway = FleetSync(fleet.address(NAMES[0]), in_fleet, name, lambda: None, lambda: 0.5, tls=lambda: tls)
    with capture_logs() as logs:
        async with gateway:
            await said(logs, "does not let this gateway speak")
    (complaint,) = (one for one in logs if one["log_level"] == "error")
    assert f"speak as {name} in the fleet {in_fleet} (Not authorized)" in complaint["event"]
    assert "certificate" not in complaint["event"].split(", so ")[0], "nothing is wrong with it"


@pytest.mark.parametrize("fleet", ["certificates"], indirect=True)
async def test_status_says_that_the_broker_refuses_the_gateway(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, mqtt=fleet.address(NAMES[0]), tls=fleet.pki.config("gateway/main"), fleet="demo")
    monkeypatch.setenv("SSL_CERT_FILE", str(fleet.pki.store.ca_cert))
    async with gateway_for(config) as (gateway, _):
        async with asyncio.timeout(10):
            while not gateway.broker_rights.refusal:
                await clock.sleep(0.01)
        told = await asyncio.to_thread(CliRunner().invoke, status, ["--admin", gateway.addresses["admin"]])
    assert told.exit_code == 0, told.output
    assert "broker: the broker does not let this gateway speak as main in the fleet demo" in " ".join(
        told.output.split()
    )


async def test_a_broker_that_lets_anybody_speak_as_anybody_is_told_of(tmp_path: Path) -> None:
    with Mosquitto(tmp_path) as loose, capture_logs() as logs:
        async with an_agent(loose.url, "device-1", tmp_path, None):
            await said(logs, "lets this device speak as any other")
    assert next(one for one in logs if "any other" in one["event"])["log_level"] == "warning"


@asynccontextmanager
async def an_agent(url: str, device: str, folder: Path, context: object) -> AsyncIterator[None]:
    state = AgentState((), ("10.0.0.7:9001",), LoadReport(1, 1, 0, 0, 0.0))
    sync = EdgeSync(
        url,
        fleet=FLEET,
        device=device,
        state=lambda: state,
        epochs=EpochStore(folder / device),
        draw=lambda: 0.5,
        tls=context,  # type: ignore[arg-type]
    )
    async with sync:
        yield


async def said(logs: list[dict[str, str]], words: str) -> None:
    async with asyncio.timeout(10):
        while not any(words in one["event"] for one in logs):
            await clock.sleep(0.01)


# -- who does not get in at all ------------------------------------------------------------------------------------


async def why_not(url: str, context: ssl.SSLContext) -> str:
    """The reason for which an MqttLink gets no session."""
    woken = asyncio.Event()
    link = MqttLink(
        url,
        client_id="device-1",
        subscriptions=(),
        draw=lambda: 0.0,
        on_activity=woken.set,
        tls=lambda: context,
    )
    with capture_logs() as logs:
        async with link, asyncio.timeout(10):
            while not (said := [one for one in logs if "no broker" in one["event"]]):
                events: list[LinkEvent] = link.take()
                assert not any(isinstance(one, MqttConnected) for one in events)
                await clock.sleep(0.01)
    return str(said[0]["reason"])


@pytest.mark.parametrize("fleet", ["certificates"], indirect=True)
async def test_a_wrong_ca_an_ended_certificate_and_none_open_no_session(fleet: Fleet, tmp_path: Path) -> None:
    strangers = FleetPki(tmp_path / "theirs")
    forged = fleet.pki.client()
    section = strangers.config("edge/device-1")
    forged.load_cert_chain(section.cert, section.key)
    for context in (forged, fleet.pki.client("edge/device-1", ended=True), fleet.pki.client()):
        assert "hung up" in await why_not(f"mqtts://localhost:{fleet.port}", context)
    assert "not trusted" in await why_not(f"mqtts://localhost:{fleet.port}", strangers.client("edge/device-1"))


@pytest.mark.parametrize("fleet", ["passwords"], indirect=True)
async def test_a_wrong_password_opens_no_session(fleet: Fleet) -> None:
    url = f"mqtts://device-1:wrong@localhost:{fleet.port}"
    reason = await why_not(url, fleet.pki.client())
    assert "Not authorized" in reason and "wrong" not in reason


async def test_plain_text_and_an_old_tls_get_nothing_from_the_broker(fleet: Fleet) -> None:
    assert await why_not(f"mqtt://localhost:{fleet.port}", fleet.pki.client()) != ""
    old = fleet.context("device-1")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert "protocol version" in (await why_not(f"mqtts://localhost:{fleet.port}", old)).lower()


async def test_a_device_that_stands_where_the_broker_is_looked_for_is_not_taken_for_it(tmp_path: Path) -> None:
    pki = FleetPki(tmp_path / "pki")
    thief = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    section = pki.config("edge/edge-2")  # its certificate is good for localhost, too
    thief.load_cert_chain(section.cert, section.key)

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=thief) as server:
        port = server.sockets[0].getsockname()[1]
        reason = await why_not(f"mqtts://device-1:secret@localhost:{port}", pki.client())
    assert "whoever answers is not the broker" in reason and "edge/edge-2" in reason


# -- the command ---------------------------------------------------------------------------------------------------


def run(folder: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(broker, ["config", "--for", "mosquitto", "--dir", str(folder), *words])
    return result.exit_code, result.output


def test_passwords_are_shown_once_and_only_their_hashes_are_kept(tmp_path: Path) -> None:
    code, shown = run(tmp_path, "--users", "passwords", "--device", "device-1")
    assert code == 0 and "mqtts://device-1:" in shown and "mqtts://gw~main:" in shown
    password = shown.partition("mqtts://device-1:")[2].partition("@")[0]
    kept = (tmp_path / PASSWD).read_text()
    assert password not in kept and (tmp_path / PASSWD).stat().st_mode & 0o077 == 0

    code, again = run(tmp_path, "--users", "passwords", "--device", "device-1", "--device", "device-2")
    assert code == 0 and "device-2:" in again and "device-1:" not in again
    assert kept.splitlines() == (tmp_path / PASSWD).read_text().splitlines()[:2]

    code, renewed = run(tmp_path, "--users", "passwords", "--new-password", "device-1")
    assert code == 0 and "mqtts://device-1:" in renewed and password not in renewed


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (["--no-tls"], "--users passwords"),
        (["--fleet", "a/b"], "the fleet's name"),
        (["--gateway", "a#"], "the gateway's name 'a#'"),
        (["--users", "passwords", "--device", "+"], "the device's name"),
        (["--users", "passwords", "--new-password", "nobody"], "there is no such user"),
        (["--pki", "nowhere"], "tidegate pki issue broker/main"),
    ],
)
def test_what_cannot_be_written_is_told_with_the_way_out(tmp_path: Path, words: list[str], way_out: str) -> None:
    code, shown = run(tmp_path, *words)
    assert code == 1 and way_out in shown


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts Mosquitto as another user than itself")
@pytest.mark.skipif(FileOwner.known("mosquitto") is None, reason="there is no user mosquitto here")
@pytest.mark.parametrize("users", ["certificates", "passwords"])
def test_the_command_that_is_printed_starts_mosquitto_as_root_and_it_becomes_its_own_user(users: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tidegate-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        pki = FleetPki(folder / "pki")
        pki.issue("broker/main")
        port = free_port()
        code, shown = run(folder / "broker", "--pki", str(pki.store.folder), "--port", str(port), "--users", users)
        assert code == 0
        command = shown.partition("start it with: ")[2].partition(",")[0]
        assert command == f"mosquitto -c {folder / 'broker' / CONF}"
        with Printed(folder, command.split()[1:]) as started:
            assert Path(f"/proc/{started.pid}").stat().st_uid == pwd.getpwnam("mosquitto").pw_uid
    finally:
        shutil.rmtree(folder)


class Printed(Mosquitto):
    """Mosquitto by the command that was printed."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        super().__init__(folder)
        self._words = words

    def command(self) -> list[str]:
        assert MOSQUITTO is not None
        return [MOSQUITTO, *self._words]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid


@pytest.mark.skipif(FileOwner.known("mosquitto") is None, reason="there is no user mosquitto here, or we are not root")
def test_a_folder_that_mosquittos_user_cannot_enter_is_told_instead_of_a_command_that_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    code, shown = run(tmp_path / "broker")
    assert code == 0 and "mosquitto cannot enter" in shown and "start it with" not in shown
    assert run(tmp_path / "broker", "--owner", "mosquitto")[0] == 1


def test_the_hash_is_the_one_that_mosquitto_passwd_makes(tmp_path: Path) -> None:
    if shutil.which("mosquitto_passwd") is None:
        pytest.skip("mosquitto_passwd is not installed")
    file = tmp_path / "passwd"
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(file), "device-1", "secret"], check=True, capture_output=True)
    theirs, ours = file.read_text().strip(), passwd_line("device-1", "secret")
    assert [len(part) for part in theirs.split("$")] == [len(part) for part in ours.split("$")]
    assert theirs.split("$")[:3] == ours.split("$")[:3]


def test_other_users_lines_are_left_as_they_are() -> None:
    before = passwd_text("", {"a": "1", "b": "2"})
    after = passwd_text(before, {"b": "3"})
    assert after.splitlines()[0] == before.splitlines()[0] and after.splitlines()[1] != before.splitlines()[1]

"""`tidegate edge doctor` against a real broker, a real link port, and a device that runs or does not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from click.testing import CliRunner

from edge_agent.app import EdgeApp
from edge_agent.cli import edge
from edge_agent.commands.doctor import run_checks
from edge_agent.config import EdgeConfig
from edge_agent.core.diagnosis import DoctorFinding
from edge_agent.offline.queue_db import StoredItem
from gateway.app import Gateway
from gateway.commands.status import ailments
from gateway.observe.conditions import conditions_json
from gateway.operate.admin import state_of
from tests.support.certificates import FleetPki
from tests.support.gateway.app import configured, until
from tests.support.models.tiny_models import tiny_repository
from tests.support.mqtt.brokers import Embedded
from tidegate import clock
from tidegate.config import load
from tidegate.fleet.stored import ItemRefusal, Receipt
from tidegate.testing.ports import free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Embedded]:
    with Embedded(tmp_path) as one:
        yield one


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "kiosk-1",
        "grpc_port": free_port(),
        "http_port": free_port(),
        "model_repository": str(tiny_repository(tmp_path / "models")),
        "models": ["double"],
        "state_dir": str(tmp_path / "state"),
        "fleet": "f",
        "warmup_budget_s": 0.5,
    }


def damage(repository: Path) -> None:
    [artefact] = list(repository.glob("double/1/*.onnx"))
    artefact.write_bytes(artefact.read_bytes()[:-1] + b"\x00\x00")


async def found(keys: dict[str, Any], **more: Any) -> dict[str, DoctorFinding]:
    return {one.check: one for one in await run_checks(load(EdgeConfig, **{**keys, **more}))}


async def test_a_device_that_runs_is_told_who_serves_it_and_keeps_its_session(
    keys: dict[str, Any], broker: Embedded, tmp_path: Path
) -> None:
    config = configured(tmp_path, name="main", mqtt=broker.url, fleet="f", link_port=0)
    keys["mqtt"] = broker.url
    async with Gateway(config) as gateway, EdgeApp(load(EdgeConfig, **keys)) as app:
        await until(lambda: bool(gateway.fleet.targets) and gateway.fleet.targets["edge/kiosk-1"].up, 30.0)
        assert app.sync is not None
        epoch = app.sync.epoch

        told = await found(keys)

        assert "gateway/main (direct)" in told["gateways"].words
        assert "running agent" in told["grpc_port"].words
        assert told["broker"].verdict == "ok"
        assert "double:1" in told["models"].words
        assert (app.sync.connected, app.sync.epoch) == (True, epoch)


async def test_a_loop_that_is_held_up_is_told_by_the_device_and_by_its_gateway(
    keys: dict[str, Any], broker: Embedded, tmp_path: Path
) -> None:
    config = configured(tmp_path, name="main", mqtt=broker.url, fleet="f", link_port=0)
    keys["mqtt"] = broker.url
    async with Gateway(config) as gateway, EdgeApp(load(EdgeConfig, **keys)) as app:
        await until(lambda: bool(gateway.fleet.targets) and gateway.fleet.targets["edge/kiosk-1"].up, 30.0)
        target = gateway.fleet.targets["edge/kiosk-1"]

        clock.block_until(clock.now() + 1.5)  # both processes' parts, which share a loop here

        await until(lambda: "loop_stalled" in target.degradation.active, 30.0)
        assert "held up" in target.degradation.active["loop_stalled"].evidence
        assert "held up" in app.state().conditions.in_words()
        assert (await found(keys))["event loop"].verdict == "warning"
        async with aiohttp.ClientSession() as session:
            told = await session.get(f"{gateway.addresses['admin']}/debug/conditions")
            subjects = {
                one["target"] for one in (await told.json())["conditions"] if one["condition"] == "loop_stalled"
            }
        assert subjects == {"gateway/main", "edge/kiosk-1"}


async def test_a_worker_that_was_lost_is_told_by_the_device_and_by_its_gateway(
    keys: dict[str, Any], broker: Embedded, tmp_path: Path
) -> None:
    config = configured(tmp_path, name="main", mqtt=broker.url, fleet="f", link_port=0)
    keys["mqtt"] = broker.url
    async with Gateway(config) as gateway, EdgeApp(load(EdgeConfig, **keys)) as app:
        await until(lambda: bool(gateway.fleet.targets) and gateway.fleet.targets["edge/kiosk-1"].up, 30.0)
        (runner,) = app.deployment.serving.runners
        assert (await found(keys))["worker"].verdict == "ok"
        assert runner.pid is not None
        os.kill(runner.pid, signal.SIGKILL)
        await until(lambda: bool(conditions_json(gateway.fleet, clock.now())), 10.0)

        told = await found(keys)
        (condition,) = conditions_json(gateway.fleet, clock.now())

        assert told["worker"].verdict == "warning"
        assert "double:1" in told["worker"].words and "1 lost since the agent's start" in told["worker"].words
        assert (condition["target"], condition["condition"], condition["model"]) == (
            "edge/kiosk-1", "worker_lost", "double",
        )  # fmt: skip
        (target,) = state_of(gateway.fleet, gateway.catalog, clock.now(), {})["targets"]
        assert "edge/kiosk-1[/]: worker_lost for" in ailments([target])[0]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
async def test_a_port_of_another_program_is_not_taken_for_the_running_agents(
    keys: dict[str, Any], tmp_path: Path, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.commands.doctor.PATIENCE_S", 2.0)  # the other program never answers
    if secure:
        keys["tls"] = FleetPki(tmp_path / "pki").config("edge/kiosk-1").model_dump(exclude_none=True)
    async with EdgeApp(load(EdgeConfig, **keys)):
        with socket.create_server(("127.0.0.1", 0)) as others:
            others.listen()
            told = await found(keys, grpc_port=others.getsockname()[1])

    assert told["grpc_port"].verdict == "failure"
    assert "running agent" in told["http_port"].words


async def test_before_it_runs_it_is_told_which_gateways_it_could_dial(
    keys: dict[str, Any], broker: Embedded, tmp_path: Path
) -> None:
    config = configured(tmp_path, name="main", mqtt=broker.url, fleet="f", link_port=0)
    async with Gateway(config) as gateway:
        nobody = f"127.0.0.1:{free_port()}"

        told = await found(keys, mqtt=broker.url, gateways=[nobody])

        assert told["gateways"].verdict == "ok"
        assert f"this device can dial {gateway.addresses['link']}" in told["gateways"].words
        assert told["grpc_port"].words.endswith("is free")


async def test_everything_that_is_wrong_is_told_at_once(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.commands.doctor.PATIENCE_S", 2.0)  # nobody answers
    (tmp_path / "state").write_text("a file in the way")
    with socket.create_server(("127.0.0.1", keys["http_port"])):
        taken = asyncio.create_task(found(keys, mqtt=f"mqtt://127.0.0.1:{free_port()}", models=["nothing"]))
        told = await taken

    failed = {check for check, finding in told.items() if finding.verdict == "failure"}
    assert failed == {"disk", "models", "http_port", "broker"}
    assert all(told[check].advice for check in failed)
    assert "nothing" in told["models"].words
    assert "Connect call failed" in told["broker"].words or "refused" in told["broker"].words


async def test_the_folder_of_the_state_is_left_to_the_agents_own_user(keys: dict[str, Any], tmp_path: Path) -> None:
    told = await found(keys, state_dir=str(tmp_path / "not" / "there"))
    assert told["disk"].verdict == "ok"
    assert not (tmp_path / "not").exists()  # the doctor, who may be root, would own it

    (tmp_path / "state").mkdir()
    await found(keys)
    assert list((tmp_path / "state").iterdir()) == []


async def test_what_a_device_keeps_and_no_gateway_takes_is_said(
    keys: dict[str, Any], tmp_path: Path, broker: Embedded
) -> None:
    keys["mqtt"] = broker.url
    async with EdgeApp(load(EdgeConfig, **keys)) as edge_app:
        assert "store" not in await found(keys)
        store = edge_app.offline.store
        assert store is not None
        await store.put(StoredItem("1" * 32, "request", b"x"))
        await store.settle(Receipt("main", refused=(ItemRefusal("1" * 32, "no", final=True),)))
        told = await found(keys)

    assert (told["store"].verdict, told["store"].words) == ("warning", "dead letters, which no gateway takes: 1")


async def test_a_damaged_model_and_a_certificate_that_has_ended_are_found(keys: dict[str, Any], tmp_path: Path) -> None:
    damage(Path(keys["model_repository"]))
    section = FleetPki(tmp_path / "pki").config("edge/kiosk-1", ended=True)

    told = await found(keys, tls=section.model_dump(exclude_none=True))

    assert told["models"].verdict == "failure"
    assert (told["certificate"].verdict, told["certificate"].words) == ("failure", "the certificate has ended")


async def test_over_tls_a_running_agent_is_known_by_its_certificate(keys: dict[str, Any], tmp_path: Path) -> None:
    keys["tls"] = FleetPki(tmp_path / "pki").config("edge/kiosk-1").model_dump(exclude_none=True)
    async with EdgeApp(load(EdgeConfig, **keys)):
        told = await found(keys)

    assert {told[key].verdict for key in ("grpc_port", "http_port", "certificate")} == {"ok"}
    assert "running agent" in told["grpc_port"].words


def test_with_a_broker_too_nothing_but_the_findings_is_on_stdout(
    keys: dict[str, Any], broker: Embedded, tmp_path: Path
) -> None:
    file = tmp_path / "edge.yaml"
    file.write_text(yaml.safe_dump({**keys, "mqtt": broker.url}))

    ran = CliRunner().invoke(edge, ["--config", str(file), "doctor", "--json"])

    assert "broker" in {one["check"] for one in json.loads(ran.stdout)["findings"]}


@pytest.mark.parametrize("before", [True, False], ids=["option of the group", "option of the command"])
def test_the_command_exits_with_1_only_where_something_keeps_the_device_from_serving(
    keys: dict[str, Any], tmp_path: Path, before: bool
) -> None:
    file = tmp_path / "edge.yaml"
    file.write_text(yaml.safe_dump(keys))
    option = ["--config", str(file)]

    def run(*words: str) -> Any:
        return CliRunner().invoke(edge, [*option, "doctor", *words] if before else ["doctor", *option, *words])

    well = run("--json")
    assert well.exit_code == 0, well.output
    answer = json.loads(well.output)
    assert (answer["device"], answer["healthy"]) == ("kiosk-1", True)
    assert {"clock", "disk", "models", "memory", "processor"} <= {one["check"] for one in answer["findings"]}

    file.write_text(yaml.safe_dump({**keys, "models": ["nothing"]}))
    ill = run()
    assert ill.exit_code == 1
    assert "failure models:" in ill.output
    assert "→" in ill.output

    file.write_text(yaml.safe_dump({**keys, "gatways": []}))
    wrong = run()
    assert wrong.exit_code == 1
    assert "did you mean 'gateways'" in wrong.output

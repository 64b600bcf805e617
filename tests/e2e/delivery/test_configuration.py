"""Settings of a fleet of real processes, changed by signed orders: staged, watched, taken back, and past kill -9."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from gateway.commands.keys import keys
from simulator.crowd.cli import fleet as fleet_command
from tests.e2e.stack import eventually
from tests.support.faults.fleet_stack import FleetStack
from tests.support.models.tiny_models import tiny_repository
from tests.support.mqtt.brokers import MOSQUITTO
from tests.support.operator.resources import body, stored
from tidegate.tools.operator.rollout_handover import RolloutHandover

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="needs Mosquitto"),
]
HOT, COOL = "kiosk-1", "kiosk-2"  # the first is asked first
WITHIN_S = 90.0
LOOK_S = 0.2  # a look is a command of the operator: more of them would cost more than all that is tested


class Configured:
    """A fleet of two devices, and an operator beside it with a key."""

    def __init__(self, folder: Path) -> None:
        tiny_repository(folder / "models")
        made = CliRunner().invoke(keys, ["signing", "create", "operator", "--dir", str(folder)])
        assert made.exit_code == 0, made.output
        self.folder = folder
        zone = folder / "sys" / "thermal" / "thermal_zone0"
        zone.mkdir(parents=True)
        (zone / "type").write_text("cpu-thermal\n")
        (zone / "temp").write_text("60000\n")
        edge = {
            "models": ["double"],
            "warmup_budget_s": 0.2,
            "rollout": {"keys": [str(folder / "operator.pub")], "groups": ["kiosks"], "recheck_s": 0.1},
            "device_file": str(folder / "absent.yaml"),
        }
        self.fleet = FleetStack(
            folder / "fleet",
            folder / "models",
            edges={HOT: {**edge, "sensors": str(folder / "sys")}, COOL: {**edge, "sensors": None}},
            gateway={"artifacts": {"folder": str(folder / "artifacts"), "port": 0}},
        )

    @property
    def admin(self) -> str:
        return self.fleet.gateway.addresses["admin"]

    def configure(self, settings: dict[str, Any], *words: str) -> Result:
        self.wait("no rollout is under way", lambda: self.phases() <= {"succeeded", "returned"})
        file = self.folder / "settings.yaml"
        file.write_text(yaml.safe_dump(settings))
        key = ("--key", str(self.folder / "operator.key"))
        staging = ("--waves", "50%,100%", "--watch", "2s", "--success", "1")
        return self.run("configure", "kiosks", str(file), *key, *staging, *words)

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(fleet_command, [*words, "--admin", self.admin, "--json"])

    def rows(self) -> dict[str, dict[str, Any]]:
        found = self.run("configuration")
        assert found.exit_code == 0, found.output
        return {row["device"]: row for row in json.loads(found.stdout)["devices"]}

    def read(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.admin}{path}", timeout=10) as answer:
            return json.load(answer)

    def phases(self) -> set[str]:
        return {one["phase"] for one in self.read("/v1/rollouts")["rollouts"]}

    def has(self, name: str, settings: dict[str, Any]) -> bool:
        """Whether these settings are desired of a device, and in force there."""
        row = self.rows()[name]
        return bool(row["desired"] == settings and row["state"] == "in_sync")

    def told(self, name: str) -> dict[str, Any]:
        """What the agent itself says of its settings."""
        with urllib.request.urlopen(f"{self.fleet.part(name).addresses['http']}/v1/state", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)["configuration"]
            return found

    def wait(self, what: str, true: Callable[[], bool]) -> None:
        try:
            eventually(true, WITHIN_S, what, every_s=LOOK_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.rows()}\n{self.fleet.logs}") from None

    def states(self) -> dict[str, str]:
        return {name: row["state"] for name, row in self.rows().items()}


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configured]:
    configured = Configured(tmp_path_factory.mktemp("configured"))
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TIDEGATE_EDGE_SENSORS", raising=False)  # which keeps other tests' devices from feeling heat
        with configured.fleet:
            yield configured


def test_settings_reach_the_whole_group_though_an_agent_is_killed_in_the_middle(configured: Configured) -> None:
    begun = configured.configure({"max_queue_size": 7, "threads": 2, "slots": 2}, "--watch", "6s", "--detach")
    assert begun.exit_code == 0, begun.output
    configured.wait("the first is on trial", lambda: configured.told(HOT)["state"] == "active")
    assert configured.told(COOL)["state"] == "committed", "the second is not asked before the first has proven itself"

    part = configured.fleet.part(HOT)
    part.kill()
    part.start()
    part.wait_ready()

    # The first came up with everything, the second waits for a start with what only a start brings.
    configured.wait("it goes on", lambda: "next start: slots" in configured.rows()[COOL]["reason"])
    assert configured.states() == {HOT: "in_sync", COOL: "pending"}
    assert configured.rows()[COOL]["differs"] == [{"key": "slots", "value": 1, "why": "start"}]


def test_a_document_that_makes_a_device_unwell_is_taken_back_everywhere_without_a_restart(
    configured: Configured,
) -> None:
    pids = {name: configured.fleet.part(name).pid for name in (HOT, COOL)}
    before = {name: row["digest"] for name, row in configured.rows().items()}

    result = configured.configure({"max_temperature_c": 40, "max_queue_size": 9})  # and the first one is at 60 degrees

    assert result.exit_code == 1, result.output
    rollout = json.loads(result.stdout)
    assert rollout["phase"] == "returned"
    assert "closed: it is at 60 °C: max_temperature_c is 40" in rollout["reason"]
    assert rollout["devices"][COOL]["step"] == "waiting", "it was never asked"
    configured.wait("as before", lambda: {one["device"]: one["digest"] for one in configured.rows().values()} == before)
    assert {name: configured.fleet.part(name).pid for name in (HOT, COOL)} == pids
    assert all(configured.fleet.part(name).alive for name in (HOT, COOL))


def test_a_signed_order_in_a_file_is_handed_over_by_a_resource(configured: Configured) -> None:
    file = configured.folder / "order.json"
    settings = {"max_queue_size": 27}
    said = configured.configure(settings, "--out", str(file))
    assert said.exit_code == 0, said.output
    before = len(configured.read("/v1/rollouts")["rollouts"])
    rollout = stored(body("TidegateRollout", "queues", gateway="main", order=file.read_text()))
    handover = RolloutHandover({"main": configured.admin})

    begun = asyncio.run(handover.carry(rollout))

    assert (begun.fields["id"], begun.over) == (json.loads(said.stdout)["id"], False)
    configured.wait("the group has them", lambda: all(configured.has(name, settings) for name in configured.rows()))
    configured.wait("the rollout is over", lambda: asyncio.run(handover.carry(rollout)).over)
    done = asyncio.run(handover.carry(rollout))
    assert (done.fields["phase"], done.conditions[1].status) == ("succeeded", "True")
    assert len(configured.read("/v1/rollouts")["rollouts"]) == before + 1


def test_a_device_that_was_away_gets_its_settings_when_it_is_back(configured: Configured) -> None:
    away = configured.fleet.part(COOL)
    away.stop()
    configured.wait("it is away", lambda: configured.rows()[COOL]["freshness"] == "dead")
    assert configured.configure({"max_queue_size": 11}, "--detach").exit_code == 0
    configured.wait("the other one has them", lambda: configured.has(HOT, {"max_queue_size": 11}))
    assert configured.told(HOT)["state"] == "committed"

    away.start()
    away.wait_ready()

    configured.wait("both have them", lambda: configured.has(COOL, {"max_queue_size": 11}))
    assert configured.states() == {HOT: "in_sync", COOL: "in_sync"}
    configured.wait("and are counted", lambda: configured.read("/v1/state")["configuration"]["devices"]["in_sync"] == 2)

"""Real processes: a device that dials the keeper of a gateway with workers is served by them, and after a kill."""

from __future__ import annotations

import os
import signal
import urllib.error
from collections.abc import Iterator

import pytest

from tests.e2e.faults.test_nat import COSTS, ID, ask, seen, target
from tests.e2e.stack import eventually
from tests.support.faults.fleet_stack import FleetStack
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate.tools.build.demo.paced import add_paced

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
    pytest.mark.timeout(240),
]


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetStack]:
    folder = tmp_path_factory.mktemp("nat")
    add_paced("encoder", COSTS, folder / "models")
    edges = {"cellar": {"warmup_budget_s": 0.5, "log_level": "info"}}
    gateway = {"advertised_networks": ["10.0.0.0/8"], "link_port": 0, "workers": 2}
    with FleetStack(folder / "run", folder / "models", edges=edges, gateway=gateway) as running:
        yield running


def test_workers_use_the_keepers_stream_and_have_it_again_after_its_death(fleet: FleetStack) -> None:
    eventually(lambda: answered(fleet) == ID, 60.0, "a worker reaches the device")
    assert target(fleet)["road"] == "dialled out"
    state = fleet.state()
    assert state["gateways"]["count"] == 1  # devices and other gateways see one
    keeper = next(one["pid"] for one in state["workers"] if one["role"] == "keeper")

    os.kill(keeper, signal.SIGKILL)
    eventually(lambda: seen_again(fleet, keeper), 60.0, "a new keeper has the device's stream")
    eventually(lambda: {answered(fleet) for _ in range(8)} == {ID}, 60.0, "workers reach the device again")


def answered(fleet: FleetStack) -> str:
    """Who answered; until its worker has the device's stream again it is refused."""
    try:
        return ask(fleet)
    except urllib.error.HTTPError as refusal:
        return str(refusal.code)


def seen_again(fleet: FleetStack, keeper: int) -> bool:
    try:
        pids = [one["pid"] for one in fleet.state()["workers"] if one["role"] == "keeper"]
        return pids != [keeper] and seen(fleet) == "ready"
    except OSError:  # its port is away with it
        return False

"""Real processes: a device that its gateway may not dial is served because it dials, and is back after every kill."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.stack import eventually
from tests.support.faults.fleet_stack import FleetStack
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
    pytest.mark.timeout(240),
]

COSTS = PacedCosts(edge_ms=((1, 5), (100, 30)), pool_ms=((1, 10),), edge_max_units=100)
ID = "edge/cellar"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetStack]:
    """Devices may be in 10.0.0.0/8 only, and this one is not: what is dialled there would be somebody else."""
    folder = tmp_path_factory.mktemp("nat")
    add_paced("encoder", COSTS, folder / "models")
    edges = {"cellar": {"warmup_budget_s": 0.5, "log_level": "info"}}
    gateway = {"advertised_networks": ["10.0.0.0/8"], "link_port": 0}
    with FleetStack(folder / "run", folder / "models", edges=edges, gateway=gateway) as running:
        yield running


def ask(fleet: FleetStack) -> str:
    """Who answered."""
    tensors = (("input_ids", [101, 2051, 102]), ("attention_mask", [1, 1, 1]))
    inputs = [{"name": name, "shape": [1, 3], "datatype": "INT64", "data": data} for name, data in tensors]
    body = {"inputs": inputs}
    request = urllib.request.Request(
        f"{fleet.http}/v2/models/encoder/infer", json.dumps(body).encode(), {"tidegate-budget-ms": "20000"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.headers["tidegate-served-by"])


def target(fleet: FleetStack) -> dict[str, Any]:
    return fleet.targets()[ID]


def seen(fleet: FleetStack) -> str:
    """The device's state, as the gateway sees it."""
    found = fleet.targets().get(ID)
    return found["state"] if found else "gone"


def test_it_is_served_by_the_stream_it_dialled_and_the_gateway_says_why(fleet: FleetStack) -> None:
    assert ask(fleet) == ID
    assert target(fleet)["road"] == "dialled out"
    [refused] = fleet.state()["refused"]
    assert refused["device"] == "cellar"
    assert "in no network of advertised_networks" in refused["reason"]


def test_a_killed_agent_is_served_again_when_it_is_back(fleet: FleetStack) -> None:
    fleet.part("cellar").kill()
    eventually(lambda: seen(fleet) != "ready", 60.0, "the gateway notices")

    fleet.part("cellar").start()
    fleet.part("cellar").wait_ready()

    eventually(lambda: seen(fleet) == "ready", 60.0, "the device is served again")
    assert ask(fleet) == ID


def test_a_killed_gateway_finds_its_device_again(fleet: FleetStack) -> None:
    fleet.gateway.kill()
    fleet.gateway.start()
    fleet.gateway.wait_ready()

    eventually(lambda: seen(fleet) == "ready", 60.0, "the device is served again")
    assert ask(fleet) == ID


def test_it_stays_served_while_the_broker_is_gone(fleet: FleetStack) -> None:
    fleet.broker.kill()
    try:
        assert ask(fleet) == ID
        assert target(fleet)["road"] == "dialled out"
    finally:
        fleet.broker.start()

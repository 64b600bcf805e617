"""A fleet of real processes whose models only take their time: every request ends once, and parts come and go."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator.scenarios.scenario_file import parse
from simulator.world.arrivals import requests
from tests.bench.open_loop import Answer, Callers
from tests.e2e.stack import eventually
from tests.support.faults.fleet_stack import FleetStack, Part, PartFailed, standing_still
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate import clock
from tidegate.outcome import Outcome
from tidegate.tools.build.demo.paced import PacedCosts, PacedNoise, add_paced

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
    pytest.mark.timeout(240),
]

COSTS = PacedCosts(edge_ms=((1, 5), (100, 30)), pool_ms=((1, 10), (1000, 40)), edge_max_units=100)
ARRIVALS = """
summary: a hundred requests, a fifth of them too large for an edge, some with a budget that nobody can make
duration_s: 2
models: {encoder: {edge_ms: [[1, 5]]}}
links: {loopback: {}}
edges: [{count: 1, link: loopback}]
arrivals: {rate: 60}
classes:
  - {name: short, share: 7, model: encoder, length: {median: 20, max: 100}, budget_ms: 2000, priority: 1}
  - {name: long, share: 2, model: encoder, length: {median: 300, max: 1000}, budget_ms: 2000}
  - {name: hopeless, share: 1, model: encoder, length: {median: 90}, budget_ms: 2}
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetStack]:
    folder = tmp_path_factory.mktemp("fleet")
    add_paced("encoder", COSTS, folder / "models", noise=PacedNoise(edge=0.05))
    edges = {"quick": {"warmup_budget_s": 2.0}, "slow": {"warmup_budget_s": 2.0, "paced_slow": 3.0}}
    with FleetStack(folder / "run", folder / "models", edges=edges, pool={"warmup_budget_s": 2.0}) as running:
        yield running


async def asked(fleet: FleetStack, seed: int) -> list[Answer]:
    """A hundred requests at their instants."""
    callers = Callers(int(fleet.http.rpartition(":")[2]), "encoder", [101, 2051, 102])
    due = list(requests(parse(ARRIVALS, "test"), seed))[:100]
    assert len(due) == 100
    try:
        began_at = clock.now()
        return await asyncio.gather(*[callers.call(request, began_at) for request in due])
    finally:
        callers.close()


def outcomes(fleet: FleetStack) -> dict[str, float]:
    """What the gateway counted, by outcome, since its start."""
    with urllib.request.urlopen(f"{fleet.gateway.addresses['metrics']}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    counted: dict[str, float] = {}
    for labels, value in re.findall(r"^tidegate_requests_total\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        found = re.search(r'outcome="([^"]*)"', labels)
        assert found is not None
        counted[found[1]] = counted.get(found[1], 0.0) + float(value)
    return counted


async def test_of_a_hundred_requests_each_ends_once_and_the_gateway_counted_it(fleet: FleetStack) -> None:
    before = outcomes(fleet)
    answers = await asked(fleet, seed=1)
    after = outcomes(fleet)
    assert sum(after.values()) - sum(before.values()) == len(answers) == 100
    assert {one.status for one in answers if one.kind == "hopeless"} == {504}
    assert {one.status for one in answers if one.kind != "hopeless"} == {200}
    given = sum(after.get(kind, 0.0) - before.get(kind, 0.0) for kind in (Outcome.OK.value, Outcome.DEGRADED.value))
    assert given == sum(one.status == 200 for one in answers)


async def test_large_requests_go_to_the_pool_and_both_tiers_answer(fleet: FleetStack) -> None:
    answers = await asked(fleet, seed=2)
    assert {one.served_by for one in answers if one.kind == "long"} == {"pool/pool"}
    assert {"edge/quick"} <= {one.served_by for one in answers if one.kind == "short"}


def test_the_slower_device_has_measured_itself_slower(fleet: FleetStack) -> None:
    def fastest_ms(name: str) -> float:
        (model,) = fleet.targets()[f"edge/{name}"]["models"]
        return float(min(ms for _, ms in model["costs"]["int8"]["measured"]))

    assert fastest_ms("slow") > 2.0 * 5.0 * 0.8  # noise is ±5 %, a busy machine only adds
    assert fastest_ms("quick") >= 5.0 * 0.8


def test_everyone_says_that_nothing_is_computed(fleet: FleetStack) -> None:
    assert all(model["paced"] for target in fleet.targets().values() for model in target["models"])
    for address in (fleet.http, fleet.part("quick").addresses["http"]):
        with urllib.request.urlopen(f"{address}/v2/models/encoder", timeout=30) as answer:
            assert b"tidegate_paced" in answer.read()
    for name in ("quick", "slow", "pool"):
        assert "nothing is computed" in fleet.part(name).log


async def test_a_killed_edge_is_missed_by_nobody_and_used_again(fleet: FleetStack) -> None:
    quick = fleet.part("quick")
    quick.kill()
    assert not quick.alive
    answers = await asked(fleet, seed=3)
    assert {one.status for one in answers if one.kind != "hopeless"} == {200}
    quick.start()
    quick.wait_ready()
    fleet.wait_whole()
    await asyncio.to_thread(
        eventually, lambda: fleet.targets()["edge/quick"]["state"] == "ready", 30, "the edge is back"
    )


def test_a_part_can_stand_still_and_go_on(fleet: FleetStack) -> None:
    slow = fleet.part("slow")
    with standing_still(slow):
        eventually(lambda: {one.status() for one in slow.everyone()} == {"stopped"}, 30, "all have been stopped")
    assert "stopped" not in {one.status() for one in slow.everyone()}


def test_a_part_ends_in_peace_when_it_is_asked_to(fleet: FleetStack) -> None:
    fleet.restart_gateway(policy="value")
    assert fleet.gateway.config["policy"] == "value"
    slow = fleet.part("slow")
    assert slow.stop() == 0
    slow.start()
    slow.wait_ready()
    fleet.wait_whole()


def test_a_gateway_reaches_its_targets_by_another_way(tmp_path: Path) -> None:
    add_paced("encoder", COSTS, tmp_path / "models")
    wanted: dict[str, str] = {}

    def via(name: str, own: str) -> str:
        wanted[name] = own.replace("127.0.0.1", "localhost")
        return wanted[name]

    quick = {"warmup_budget_s": 0.2}
    with FleetStack(tmp_path / "run", tmp_path / "models", edges={"a": quick}, pool=quick, via=via) as fleet:
        targets = fleet.targets()
    assert {id: target["address"] for id, target in targets.items()} == {
        "edge/a": wanted["a"],
        "pool/pool": wanted["pool"],
    }


def test_a_part_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    part = Part("broken", "edge_agent", {"paced_slow": -1}, tmp_path)
    part.start()
    with pytest.raises(PartFailed, match="paced_slow"):
        part.wait_ready()
    part.kill()

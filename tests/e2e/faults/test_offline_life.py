"""A device that is cut off, killed and healed, as real processes: what it promised is answered, and answered once."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.fleet_stack import FleetStack
from tests.support.models.unsure_model import SURE, UNSURE, better_repository, kinds_repository

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.needs_mosquitto]
WITHIN_S = 60.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetStack]:
    models, better = kinds_repository(tmp_path / "m"), better_repository(tmp_path / "b")
    edges = {"kiosk": {"warmup_budget_s": 0.5}, "server": {"model_repository": str(better), "warmup_budget_s": 0.5}}
    ingest = {"ingest": {"path": str(tmp_path / "ingest.db")}}
    with FleetStack(tmp_path / "fleet", models, edges=edges, gateway=ingest, at_once=1) as stack:
        yield stack


def call(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def ask(fleet: FleetStack, x: list[list[float]]) -> tuple[int, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": x}
    return call(f"{fleet.part('kiosk').addresses['http']}/v2/models/kinds/infer", {"inputs": [tensor]})


def ticket(fleet: FleetStack, id: str) -> tuple[int, Any]:
    return call(f"{fleet.part('kiosk').addresses['http']}/v2/tickets/{id}")


def eventually(what: Callable[[], Any], fleet: FleetStack) -> Any:
    give_up_at = time.perf_counter() + WITHIN_S
    while time.perf_counter() < give_up_at:
        with contextlib.suppress(OSError):
            if found := what():
                return found
        time.sleep(0.1)
    pytest.fail(f"it never came to that:\n{fleet.logs}", pytrace=False)


def drained(fleet: FleetStack) -> Any:
    """What the device says of its store, once nothing waits in it."""
    store = call(f"{fleet.part('kiosk').addresses['http']}/v1/state")[1]["store"]
    return store if store["waiting"] == 0 else None


def records(fleet: FleetStack) -> list[Any]:
    _, found = call(f"{fleet.gateway.addresses['admin']}/v1/ingested?limit=1000")
    return [one for one in found["records"] if one["kind"] == "answer"]


def test_cut_off_killed_and_healed_a_device_keeps_every_promise_and_each_once(fleet: FleetStack) -> None:
    fleet.broker.kill()
    fleet.gateway.kill()

    first = [ask(fleet, UNSURE) for _ in range(12)]
    assert [status for status, _ in first] == [202] * 12
    fleet.part("kiosk").kill()
    fleet.part("kiosk").start()
    fleet.part("kiosk").wait_ready()  # with no broker and no gateway
    assert ask(fleet, SURE)[0] == 200
    second = [ask(fleet, UNSURE) for _ in range(5)]
    tickets = [answer["ticket"] for _, answer in [*first, *second]]
    assert [ticket(fleet, id)[1]["state"] for id in tickets] == ["waiting"] * 17

    fleet.broker.start()
    fleet.gateway.start()
    fleet.gateway.wait_ready()
    eventually(lambda: records(fleet), fleet)
    fleet.gateway.kill()  # in the middle of it
    fleet.part("kiosk").kill()
    for part in (fleet.gateway, fleet.part("kiosk")):
        part.start()
        part.wait_ready()

    eventually(lambda: all(ticket(fleet, id)[0] == 200 for id in tickets), fleet)
    answers = records(fleet)
    assert sorted(one["id"] for one in answers) == sorted(tickets)  # each once
    assert {one["variant"] for one in answers} == {"fp32"}
    for id in tickets:
        scores = ticket(fleet, id)[1]["outputs"][0]["data"]
        assert scores.index(max(scores)) == 3
    kept = eventually(lambda: drained(fleet), fleet)  # events of changing modes too
    assert (kept["dead"], kept["tickets"]) == (0, {"done": 17})

"""Real processes: a gateway whose pool and edge are killed, and what it still answers.

caller ──▶ gateway ──▶ edge, pool
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.e2e.stack import eventually
from tests.support.faults.fleet_stack import Part
from tidegate import clock
from tidegate.testing.ports import free_port
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(240)]


class Fleet(NamedTuple):
    gateway: Part
    pool: Part
    edge: Part

    def ask(self, value: int, **headers: str) -> tuple[int, dict[str, str], dict[str, Any]]:
        inputs = [
            {"name": name, "shape": [1, 3], "datatype": "INT64", "data": [first, 1, 1]}
            for name, first in (("input_ids", value), ("attention_mask", 1))
        ]
        url = f"{self.gateway.addresses['http']}/v2/models/encoder/infer"
        said = {"tidegate-budget-ms": "5000", **{name.replace("_", "-"): one for name, one in headers.items()}}
        body = json.dumps({"inputs": inputs}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, said), timeout=60) as answer:
                status, told, raw = answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            status, told, raw = error.code, dict(error.headers), error.read()
        return status, {name.lower(): one for name, one in told.items()}, json.loads(raw)


@pytest.fixture
def fleet(tmp_path: Any) -> Iterator[Fleet]:
    models = tmp_path / "models"
    add_paced("encoder", PacedCosts(edge_ms=((1, 5),), pool_ms=((1, 5),)), models)
    pool_port, edge_port = free_port(), free_port()
    usual: dict[str, Any] = {"model_repository": str(models), "warmup_budget_s": 0.5, "log_level": "info"}
    pool = Part("pool", "cloud_pool", {**usual, "threads": 1, "grpc_port": pool_port}, tmp_path)
    edge_keys = {**usual, "name": "attic", "grpc_port": edge_port, "http_port": None, "state_dir": str(tmp_path / "s")}
    edge = Part("attic", "edge_agent", edge_keys, tmp_path)
    gateway_keys = {
        "model_repository": str(models),
        "targets": [
            {"name": "pool", "address": f"127.0.0.1:{pool_port}"},
            {"name": "attic", "tier": "edge", "address": f"127.0.0.1:{edge_port}"},
        ],
        "cache": {"models": {"encoder": {}}, "ttl_s": 0.1, "stale_for_s": 3600},
        **{f"{door}_port": free_port() for door in ("http", "grpc", "metrics", "admin")},
    }
    gateway = Part("gateway", "gateway", gateway_keys, tmp_path)
    with contextlib.ExitStack() as stack:
        for part in (pool, edge, gateway):
            stack.callback(part.kill)
            part.start()
        for part in (pool, edge, gateway):
            part.wait_ready()
        running = Fleet(gateway, pool, edge)
        eventually(lambda: running.ask(9)[0] == 200, 60.0, f"it answers\n{gateway.log[-2000:]}")
        yield running


def test_with_pool_and_edge_killed_the_last_known_answer_is_given_with_its_age(fleet: Fleet) -> None:
    asked_at = clock.now()
    code, said, first = fleet.ask(1, tidegate_series="camera-7")
    known_at = clock.now()
    assert (code, "tidegate-last-known" in said) == (200, False)

    fleet.pool.kill()
    fleet.edge.kill()

    eventually(lambda: fleet.ask(1, tidegate_max_age_s="0")[0] == 503, 60.0, "it is seen that nothing is left")
    asked_again_at = clock.now()
    code, said, answer = fleet.ask(1)
    assert (code, said["tidegate-served-by"], said["tidegate-route"][:10]) == (200, "cache", "last-known")
    assert "degraded=1" in said["tidegate-route"]
    age_s = float(said["tidegate-last-known"].removeprefix("age-s=").removesuffix("; of=input"))
    rounded_s = 0.05
    assert asked_again_at - known_at - rounded_s <= age_s <= clock.now() - asked_at + rounded_s
    assert answer["outputs"] == first["outputs"]

    code, said, _ = fleet.ask(2, tidegate_series="camera-7")
    assert code == 200 and said["tidegate-last-known"].endswith("of=series")
    assert fleet.ask(2)[0] == 503
    code, said, refused = fleet.ask(1, tidegate_max_age_s="0")
    assert (code, refused["code"], said["tidegate-refused"]) == (503, "nothing_alive", "nothing_alive")

    fleet.edge.start()
    fleet.edge.wait_ready()
    eventually(lambda: fleet.ask(1)[1].get("tidegate-served-by") == "edge/attic", 60.0, "and the edge answers again")

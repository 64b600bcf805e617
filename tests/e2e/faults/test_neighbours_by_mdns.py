"""Real processes that know of each other nothing but names, without a broker: found, killed, and stopped."""

from __future__ import annotations

import contextlib
import json
import signal
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_agent.core.help.announced_neighbours import KEEP_S
from tests.e2e.stack import eventually
from tests.support.faults.fleet_stack import Part
from tidegate.testing.ports import free_port
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytest.importorskip("zeroconf")
pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(180)]

TTL_S = 6.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Part, Part]]:
    """The device that asks, and the one that answers."""
    add_paced("own", PacedCosts(edge_ms=((1, 5),)), tmp_path / "kiosk" / "models")
    add_paced("far", PacedCosts(edge_ms=((1, 5),)), tmp_path / "near" / "models")
    fleet = f"f{uuid.uuid4().hex[:12]}"  # beside other runs on this machine

    def part(name: str, **keys: Any) -> Part:
        where = {
            "name": name,
            "fleet": fleet,
            "grpc_port": free_port(),
            "http_port": free_port(),
            "model_repository": str(tmp_path / name / "models"),
            "state_dir": str(tmp_path / name / "state"),
            "warmup_budget_s": 0.2,
            "log_level": "info",
            "mdns": {"interfaces": ["127.0.0.1"], "ttl_s": TTL_S},
        }
        return Part(name, "edge_agent", where | keys, tmp_path)

    kiosk = part("kiosk", help={"neighbours": ["near"]}, dial_out="never")
    near = part("near", answer_neighbours={"devices": ["kiosk"]})
    with contextlib.ExitStack() as stack:
        for one in (kiosk, near):
            stack.callback(one.kill)
            one.start()
            one.wait_ready()
        yield kiosk, near


def found(part: Part) -> dict[str, str]:
    with urllib.request.urlopen(f"{part.addresses['http']}/v1/state", timeout=30) as answer:
        told: dict[str, str] = json.load(answer)["mdns"]["found"]
    return told


def served_by(part: Part) -> str:
    body = {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}]}
    body["inputs"].append({**body["inputs"][0], "name": "attention_mask"})
    request = urllib.request.Request(
        f"{part.addresses['http']}/v2/models/far/infer", json.dumps(body).encode(), {"tidegate-budget-ms": "20000"}
    )
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.headers["tidegate-served-by"])
    return ""


def test_a_killed_neighbour_ages_out_comes_back_elsewhere_and_is_gone_at_once_when_it_is_stopped(
    site: tuple[Part, Part],
) -> None:
    kiosk, near = site
    eventually(lambda: served_by(kiosk) == "edge/near", 30.0, kiosk.log[-2000:])
    assert found(kiosk) == {"near": near.addresses["grpc"]}

    near.kill()
    took_s = eventually(lambda: found(kiosk) == {}, 40.0, "the killed one ages out")
    assert took_s <= TTL_S + KEEP_S + 5.0
    assert kiosk.alive and served_by(kiosk) == ""

    near.config |= {"grpc_port": free_port()}
    near.start()
    near.wait_ready()
    eventually(lambda: served_by(kiosk) == "edge/near", 40.0, kiosk.log[-2000:])
    assert found(kiosk) == {"near": near.addresses["grpc"]}

    near.signal(signal.SIGTERM)
    assert eventually(lambda: found(kiosk) == {}, 10.0, "it said goodbye") < TTL_S
    assert kiosk.stop() == 0

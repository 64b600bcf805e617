"""Pools on a real Ray cluster, before which a gateway is kept busy: nothing is lost while Serve does its work.

Nor while Ray's control store is away. For how long it may be, and the whole head with it, is for
`tests/bench/ray_serve.py`, since a head takes minutes to come back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from tests.support.mqtt.brokers import MOSQUITTO
from tests.support.ray.node import PYTHON, ROOT
from tests.support.ray.own_network import in_own_network
from tests.support.stores import REDIS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.needs_mosquitto, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    alone = in_own_network()
    if not PYTHON.is_file():
        pytest.skip("no Ray here: make ray")
    if MOSQUITTO is None or REDIS is None or alone is None:
        pytest.skip("needs Mosquitto, redis-server, and a network namespace of its own")
    # Not pytest's own folder, whose name is longer in a run of several processes: a socket's path is allowed 107 bytes,
    # and Ray puts some 70 behind this one.
    with tempfile.TemporaryDirectory(prefix="tidegate-ray-") as folder:
        words = [*alone, sys.executable, "-m", "tests.support.ray.scenario", folder]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=840)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


PHASES = ["calm", "control_away", "control_back", "killed", "updated", "fewer"]


@pytest.mark.parametrize("phase", PHASES)
def test_no_request_fails(told: dict[str, Any], phase: str) -> None:
    assert told["sent"][phase] > 5
    assert told["failed"].get(phase, []) == []


def test_replicas_come_by_the_signal_and_come_back_under_their_names(told: dict[str, Any]) -> None:
    assert {"first_s", "scaled_s", "back_s", "updated_s", "fewer_s", "ended_s"} <= set(told)  # each was waited for


def test_the_replicas_are_the_same_processes_once_the_control_store_is_back(told: dict[str, Any]) -> None:
    assert told["control_stayed_away"] is True  # Ray starts none again
    assert told["control_same"] is True


def test_the_scaler_says_what_it_did_and_ends_with_ctrl_c(told: dict[str, Any]) -> None:
    assert told["scaler"]["code"] == 130
    events = told["scaler"]["events"]
    assert [one["replicas"] for one in events if one["event"] == "scaled"][:1] == [2]
    assert {"event": "back"} in events  # after the trouble with a control store that was away


def test_ray_leaves_no_process_and_no_file_behind(told: dict[str, Any]) -> None:
    assert told["left"] == []

"""Pools on a real node of Ray, before which a gateway is kept busy: nothing is lost while Serve does its work."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.mqtt.brokers import MOSQUITTO
from tests.support.ray.cluster import PYTHON, ROOT
from tests.support.ray.scenario import in_own_network

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.needs_mosquitto, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    alone = in_own_network()
    if not PYTHON.is_file():
        pytest.skip("no Ray here: make ray")
    if MOSQUITTO is None or alone is None:
        pytest.skip("needs Mosquitto, and a network namespace of its own")
    # Not pytest's own folder, whose name is longer in a run of several processes: a socket's path is allowed 107 bytes,
    # and Ray puts some 70 behind this one.
    with tempfile.TemporaryDirectory(prefix="tidegate-ray-") as folder:
        words = [*alone, sys.executable, "-m", "tests.support.ray.scenario", folder]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=360)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("phase", ["calm", "killed", "updated", "fewer"])
def test_no_request_fails(told: dict[str, Any], phase: str) -> None:
    assert told["sent"][phase] > 20
    assert told["failed"].get(phase, []) == []


def test_replicas_come_by_the_signal_and_come_back_under_their_names(told: dict[str, Any]) -> None:
    assert {"first_s", "scaled_s", "back_s", "updated_s", "fewer_s", "ended_s"} <= set(told)  # each was waited for


def test_the_scaler_says_what_it_did_and_ends_with_ctrl_c(told: dict[str, Any]) -> None:
    assert told["scaler"]["code"] == 130
    events = [json.loads(line) for line in told["scaler"]["said"].splitlines()]
    assert events[0] == {"event": "scaled", "replicas": 2}


def test_ray_leaves_no_process_and_no_file_behind(told: dict[str, Any]) -> None:
    left = subprocess.run(["pgrep", "-f", told["session"]], capture_output=True, text=True, check=False).stdout
    assert not left.split()
    assert not Path(told["session"]).exists()

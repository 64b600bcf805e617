"""A crowd of simulated devices, before a real broker and a real gateway."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.fleet_sync.registry import FleetRegister
from gateway.operate.devices import summary_of
from simulator.crowd.cli import fleet
from simulator.crowd.epochs import InMemoryEpochs
from simulator.crowd.habits import AWAY_S, Habits
from tests.e2e.stack import eventually
from tests.support.faults.fleet_stack import FleetStack
from tests.support.mqtt.brokers import MOSQUITTO
from tests.support.mqtt.device_messages import TOPICS, Device

SOME = 12


def test_stays_are_as_long_as_the_churn_says_and_for_ever_without_any() -> None:
    draw = random.Random(1).random
    assert Habits().stay_s(draw) == inf
    stays = [Habits(churn_per_minute=0.5).stay_s(draw) for _ in range(4000)]
    assert mean(stays) == pytest.approx(120.0, rel=0.1)


def test_absences_arrivals_and_crashes_keep_to_their_ranges() -> None:
    draw, habits = random.Random(1).random, Habits(ramp_s=8.0, crash_ratio=0.25)
    assert all(AWAY_S[0] <= habits.away_s(draw) <= AWAY_S[1] for _ in range(100))
    assert all(0.0 <= habits.arrives_after_s(draw) <= 8.0 for _ in range(100))
    assert mean(habits.crashes(draw) for _ in range(4000)) == pytest.approx(0.25, abs=0.03)


def test_a_simulated_epoch_grows_and_obeys_a_hint_like_a_kept_one() -> None:
    epochs = InMemoryEpochs()
    first = epochs.bump(0.0)
    assert epochs.bump(0.0) == first + 1
    assert epochs.bump(0.0, at_least=1_000) == 1_000
    assert epochs.current == 1_000


def test_a_summary_counts_by_freshness_and_says_how_old_the_live_ones_are() -> None:
    register, live, gone = FleetRegister(TOPICS, draw=lambda: 0.5), Device("live"), Device("gone")
    for device in (live, gone):
        register.fold(*device.birth(10.0), 10.0)
    register.fold(*live.heartbeat(29.5), 29.5)
    told = summary_of(register.devices(30.0))
    assert (told["known"], told["freshness"]) == (2, {"fresh": 1, "dead": 1})
    assert told["age_s"] == {"p50": 0.5, "p90": 0.5, "p99": 0.5, "p100": 0.5}
    assert summary_of(()) == {"known": 0, "freshness": {}, "age_s": {}}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetStack]:
    folder = tmp_path_factory.mktemp("crowd")
    (folder / "models").mkdir()
    with FleetStack(folder, folder / "models", edges={}) as running:
        yield running


def devices(stage: FleetStack, *, all: bool = False) -> dict[str, Any]:
    with urllib.request.urlopen(f"{stage.gateway.addresses['admin']}/v1/fleet?all={int(all)}", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def console_targets(stage: FleetStack) -> list[Any]:
    """What the console, and `tidegate top` with it, lists."""
    with urllib.request.urlopen(f"{stage.gateway.addresses['admin']}/console/live", timeout=10) as answer:
        for line in answer:
            if line.startswith(b"event: snapshot"):
                found: list[Any] = json.loads(answer.readline().removeprefix(b"data: "))["targets"]
                return found
    raise AssertionError("the stream ended without a snapshot")


def started(stage: FleetStack, *options: str) -> subprocess.Popen[str]:
    """`tidegate fleet simulate`, as a user starts it."""
    command = [sys.executable, "-c", "from simulator.crowd.cli import fleet; fleet()", "simulate", "--json"]
    options = ("--broker", stage.broker.url, "--ramp", "0", "--interval", "0.5", *options)
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


needs_mosquitto = [
    pytest.mark.slow,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]


class TestBeforeARealGateway:
    pytestmark = needs_mosquitto

    def test_the_gateway_sees_the_whole_crowd_and_hears_its_goodbye(self, stage: FleetStack) -> None:
        crowd = started(stage, "--agents", str(SOME))
        try:
            eventually(lambda: devices(stage)["freshness"].get("fresh") == SOME, 60.0, "all are heard")
            one = devices(stage, all=True)["devices"][0]
            assert (one["name"], one["agent"], one["reason"]) == ("sim-00000", "simulated", "")
            assert not stage.targets(), "nobody dials them"
            assert console_targets(stage) == [], "and so the console has none of them, as the help says"
        finally:
            crowd.send_signal(signal.SIGINT)
            said, errors = crowd.communicate(timeout=60)
        assert (crowd.returncode, "Traceback" in errors) == (0, False), errors
        assert json.loads(said.splitlines()[-1])["birth"] >= SOME
        eventually(lambda: devices(stage)["freshness"] == {"dead": SOME}, 30.0, "goodbyes count at once")
        assert all("goodbye" in one["reason"] for one in devices(stage, all=True)["devices"])

    def test_a_power_cut_is_told_by_the_will_and_whoever_comes_back_is_born_again(self, stage: FleetStack) -> None:
        crowd = started(stage, "--agents", "4", "--churn", "600", "--crashes", "100")
        wills, back, epochs = set[str](), set[str](), dict[str, int]()

        def seen() -> bool:
            for one in devices(stage, all=True)["devices"]:
                if "last will" in one["reason"]:
                    wills.add(one["name"])
                    epochs.setdefault(one["name"], one["epoch"])
                elif one["freshness"] == "fresh" and one["epoch"] > epochs.get(one["name"], one["epoch"]):
                    back.add(one["name"])
            return bool(wills & back)

        try:
            eventually(seen, 110.0, "a will, and a birth after it")
        finally:
            crowd.terminate()
            crowd.communicate(timeout=60)


def test_the_help_points_at_the_view_that_has_the_devices_and_not_at_those_that_have_none() -> None:
    told = " ".join(CliRunner().invoke(fleet, ["simulate", "--help"]).output.split())
    assert "/v1/fleet?all=1" in told
    assert "show none of them" in told and "makes of them with `tidegate status`" not in told


def test_a_broker_that_is_no_address_is_said_at_once(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from simulator.crowd.cli import fleet

    result = CliRunner().invoke(fleet, ["simulate", "--broker", "redis://somewhere"])
    assert result.exit_code == 2
    assert "--broker" in result.output
    assert "mqtt://" in result.output

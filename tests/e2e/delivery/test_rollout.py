"""Rollouts to a fleet of real processes: in waves, with automatic return, and resumed after a kill, under traffic."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gateway.commands.keys import keys
from tests.e2e.stack import eventually
from tests.support.edge.rollouts import made
from tests.support.faults.fleet_stack import FleetStack
from tests.support.models.tiny_models import tiny_repository
from tests.support.mqtt.brokers import MOSQUITTO
from tests.support.observe.browser import MISSING, PROGRAM, SHOTS, chromium
from tidegate.tools.build.cli import model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="needs Mosquitto"),
]
EDGES = ("kiosk-1", "kiosk-2", "kiosk-3")
CANARY = "kiosk-3"
WITHIN_S = 90.0
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 3.0]}]}).encode()
_versions = count(2)  # each test ships one of its own, over whatever was there before


class Ship:
    """A fleet, and an operator beside it with a key and a repository."""

    def __init__(self, folder: Path) -> None:
        tiny_repository(folder / "models")
        tiny_repository(folder / "own")
        made_key = CliRunner().invoke(keys, ["signing", "create", "operator", "--dir", str(folder)])
        assert made_key.exit_code == 0, made_key.output
        self.folder = folder
        edge = {"models": ["double"], "warmup_budget_s": 0.2, "sensors": None, "store": None}
        taking = {"keys": [str(folder / "operator.pub")], "recheck_s": 0.1}
        groups = {name: ["canaries" if name == CANARY else "others"] for name in EDGES}
        self.fleet = FleetStack(
            folder / "fleet",
            folder / "models",
            edges={name: {**edge, "rollout": {**taking, "groups": groups[name]}} for name in EDGES},
            gateway={"artifacts": {"folder": str(folder / "artifacts"), "port": 0}},
        )

    @property
    def admin(self) -> str:
        return self.fleet.gateway.addresses["admin"]

    def version(self, *, factor: float = 2.0, wrong: float = 0.0) -> str:
        """A new version in the operator's repository, with golden cases that it keeps or not."""
        version = str(next(_versions))
        one = made(version, factor=factor, wrong=wrong)
        place = self.folder / "own" / "double" / version
        place.mkdir()
        for artefact in one.files:
            (place / artefact.path).write_bytes(one.contents[artefact.sha256])
        x = np.arange(8, dtype=np.float32).reshape(1, 8)
        np.savez(self.golden(version), x=x, y=factor * x)
        return version

    def golden(self, version: str) -> Path:
        return self.folder / f"golden-{version}.npz"

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(model, [*words, "--admin", self.admin, "--json"])

    def rollout(self, version: str, *words: str) -> Result:
        probe = ("--golden", str(self.golden(version)), "--atol", "0.01")
        usual = (
            "--repository",
            str(self.folder / "own"),
            "--key",
            str(self.folder / "operator.key"),
            "--deadline",
            "1h",
        )
        return self.run("rollout", "double", "--version", version, *usual, *probe, *words)

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.admin}/v1/rollouts", timeout=10) as answer:
            newest: dict[str, Any] = json.load(answer)["rollouts"][-1]
            return newest

    def phase(self) -> str:
        """Of the newest rollout; "" while nobody answers."""
        try:
            return str(self.status()["phase"])
        except OSError:
            return ""

    def wait(self, true: Callable[[], bool], what: str) -> None:
        try:
            eventually(true, WITHIN_S, what, every_s=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.status()}\n{self.running()}\n{self.fleet.logs}") from None

    def running(self) -> dict[str, str]:
        """By device: the version that it says it runs."""
        found = json.loads(self.run("status", "double").stdout)
        return {row["device"]: row["running"] for row in found["devices"]}


@pytest.fixture(scope="module")
def ship(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ship]:
    ship = Ship(tmp_path_factory.mktemp("ship"))
    with ship.fleet:
        yield ship


@contextmanager
def callers(ship: Ship) -> Iterator[Counter[Any]]:
    """Requests without a version, one after another; what came of them: (version, answer) or the error."""
    outcomes: Counter[Any] = Counter()
    stop = threading.Event()

    def ask() -> None:
        url = f"{ship.fleet.http}/v2/models/double/infer"
        while not stop.wait(0.01):
            try:
                request = urllib.request.Request(url, BODY, {"tidegate-budget-ms": "20000"})
                with urllib.request.urlopen(request, timeout=30) as answer:
                    got = json.load(answer)
                outcomes[got["model_version"], tuple(got["outputs"][0]["data"])] += 1
            except OSError as error:
                detail = getattr(error, "read", lambda: b"")()
                outcomes[f"{error} {detail!r}"] += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        eventually(lambda: outcomes.total() > 0, WITHIN_S, "a first answer")
        yield outcomes
    finally:
        stop.set()
        thread.join()


def errors(outcomes: Counter[Any]) -> list[Any]:
    return [one for one in outcomes if not isinstance(one, tuple)]


def test_a_good_model_reaches_all_in_waves_and_goes_back_without_a_key(ship: Ship) -> None:
    before, version = ship.running(), ship.version(factor=4.0)
    push = ("push", "double", "--version", version, "--repository", str(ship.folder / "own"))
    first, again = (json.loads(ship.run(*push).stdout) for _ in range(2))
    assert (first["sent_bytes"], again["sent_bytes"]) == (first["bytes"], 0)
    with callers(ship) as outcomes:
        groups = ("--group", "canaries", "--group", "others")
        done = ship.rollout(version, "--waves", "30%,100%", "--soak", "1s", "--min-requests", "5", *groups)
        assert done.exit_code == 0, done.output + str(done.exception) + ship.fleet.logs
        ship.wait(lambda: outcomes[version, (4.0, 12.0)] > 0, f"an answer of {version}")
        assert set(ship.running().values()) == {version}
        parts = json.loads(done.stdout)["devices"]
        assert {name: part["wave"] for name, part in parts.items()} == {"kiosk-1": 1, "kiosk-2": 1, CANARY: 0}

        back = ship.run("rollback", "double", "--why", "only a test")
        assert back.exit_code == 0, back.output + ship.fleet.logs
        ship.wait(lambda: ship.running() == before, f"{before} again")

    assert errors(outcomes) == []
    assert {answer for number, answer in outcomes if number == version} == {(4.0, 12.0)}


def test_a_bad_model_comes_back_by_itself_with_the_reason_and_nobody_noticed(ship: Ship) -> None:
    before, version = ship.running(), ship.version(factor=2.0, wrong=1.0)
    with callers(ship) as outcomes:
        done = ship.rollout(version, "--waves", "30%,100%", "--soak", "0s")
        assert done.exit_code == 1, done.output
        found = json.loads(done.stdout)

    assert found["phase"] == "returned" and "probe_accuracy" in found["reason"]
    assert found["counts"]["waiting"] == 2  # the canary was enough to know
    assert ship.running() == before
    assert errors(outcomes) == [] and not any(number == version for number, _ in outcomes)


@pytest.mark.parametrize("killed", ["gateway", "broker"])
def test_a_rollout_goes_on_after_a_kill(ship: Ship, killed: str) -> None:
    version = ship.version(factor=3.0)
    words = ("--waves", "30%,100%", "--soak", "0s", "--bake", "1s", "--detach")
    assert ship.rollout(version, *words).exit_code == 0
    ship.wait(lambda: ship.status()["counts"]["succeeded"] == 1, "the canary has committed")
    assert ship.status()["phase"] == "running"

    if killed == "gateway":
        ship.fleet.gateway.signal(signal.SIGKILL)
        ship.fleet.gateway.kill()
        ship.fleet.gateway.start()
        ship.fleet.gateway.wait_ready()
    else:
        ship.fleet.broker.kill()
        ship.fleet.broker.start()

    ship.wait(lambda: ship.phase() == "succeeded", "the rollout succeeds")
    assert set(ship.running().values()) == {version}
    with callers(ship) as outcomes:
        ship.wait(lambda: outcomes[version, (3.0, 9.0)] > 0, f"an answer of {version}")


def test_a_promoted_version_that_is_rolled_back_leaves_no_request_without_an_answer(ship: Ship) -> None:
    (old,) = set(ship.running().values())
    version = ship.version(factor=5.0)
    some = ("--device", "kiosk-1", "--device", "kiosk-2")
    with callers(ship) as outcomes:
        done = ship.rollout(version, "--waves", "100%", "--soak", "0s", *some)
        assert done.exit_code == 0, done.output + ship.fleet.logs
        begun = json.loads(ship.run("split", "double", version, "--standing", old, "--share", "50%").stdout)
        assert (begun["meant"], begun["trial"]["candidate"]) == (old, version)
        promoted = json.loads(ship.run("promote", "double").stdout)
        assert (promoted["meant"], promoted["preferred"], promoted["ready"]) == (version, version, True)
        seen = outcomes[version, (5.0, 15.0)]
        ship.wait(lambda: outcomes[version, (5.0, 15.0)] > seen + 20, "answers of the promoted version")

        back = ship.run("rollback", "double")
        assert back.exit_code == 0, back.output + ship.fleet.logs
        assert f"requests that name no version get double {old}" in back.stderr
        ship.wait(lambda: set(ship.running().values()) == {old}, f"{old} again")
        before = outcomes.total()
        ship.wait(lambda: outcomes.total() > before + 77, "answers after the rollback")
    assert errors(outcomes) == []

    restarted = ship.fleet
    restarted.gateway.kill()
    restarted.gateway.start()
    restarted.gateway.wait_ready()
    restarted.wait_whole()
    with urllib.request.urlopen(f"{ship.fleet.http}/v2/models/double/ready", timeout=10) as ready:
        assert ready.status == 200
    with callers(ship) as outcomes:
        ship.wait(lambda: outcomes.total() > 20, "answers after the restart")
    assert {one[0] for one in outcomes} == {old}, outcomes


def test_after_a_finished_rollout_a_split_is_beside_the_new_version_or_refused(ship: Ship) -> None:
    (old,) = set(ship.running().values())
    version = ship.version(factor=6.0)
    done = ship.rollout(version, "--waves", "100%", "--soak", "0s")
    assert done.exit_code == 0, done.output + ship.fleet.logs

    nothing = ship.run("split", "double", version, "--share", "5%")
    assert nothing.exit_code == 1
    assert f"double {version} is what requests get already" in nothing.output and "(3 edges)" in nothing.output
    nowhere = ship.run("split", "double", version, "--standing", old, "--share", "5%")
    assert nowhere.exit_code == 1
    assert f"no target serves double {old}" in nowhere.output and f"rollout double --version {old}" in nowhere.output
    begun = json.loads(ship.run("split", "double", old, "--share", "5%").stdout)
    assert (begun["meant"], begun["trial"]["standing"], begun["trial"]["candidate"]) == (version, version, old)
    unserved = ship.run("promote", "double")
    assert unserved.exit_code == 1 and f"no target serves double {old}, so it cannot be promoted" in unserved.output
    returned = json.loads(ship.run("return", "double").stdout)
    assert (returned["meant"], returned["trial"]) == (version, None)
    with callers(ship) as outcomes:
        ship.wait(lambda: outcomes.total() > 20, "answers after the return")
    assert set(outcomes) == {(version, (6.0, 18.0))}

    try:
        urllib.request.urlopen(
            urllib.request.Request(f"{ship.fleet.http}/v2/models/double/versions/{old}/infer", BODY), timeout=30
        )
    except urllib.error.HTTPError as refusal:
        with refusal:
            words = refusal.read().decode()
        assert refusal.code == 503 and f"double version {old}" in words and f"versions on offer: {version}" in words
    else:
        raise AssertionError("no target serves it")


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
async def test_the_console_shows_a_rollout_until_its_end(ship: Ship) -> None:
    version, words = ship.version(), ("--waves", "30%,100%", "--soak", "0s", "--min-requests", "0")
    async with chromium() as browser, browser.page() as page:
        await page.goto(f"{ship.admin}/")
        going = asyncio.create_task(asyncio.to_thread(ship.rollout, version, *words))
        shown = "(document.querySelector('#rollouts li')?.textContent ?? '')"
        await page.until(f"{shown}.includes('double {version}')", WITHIN_S)
        await page.until(f"{shown}.includes('double {version}succeeded')", WITHIN_S)
        assert "3 succeeded" in await page.text("#rollouts li")
        await page.screenshot(SHOTS / "console-rollout.png")
        assert page.errors == []
        done = await going
    assert done.exit_code == 0, done.output

"""One rollout with one fault, by seed: the process that is killed, the instant, and the quality of the model."""

from __future__ import annotations

import random
import time
import urllib.error
from dataclasses import dataclass

from tests.support.edge.device_life import DeviceLife
from tests.support.edge.rollouts import made
from tidegate.fleet.reported import ModelReport, RolloutState

PADDING_BYTES = 300_000


@dataclass(frozen=True, slots=True)
class Ended:
    """How it went. `wrong`: what was not as promised, "" when all was."""

    seed: int
    killed: str
    report: ModelReport
    wrong: str


def misfortune(device: DeviceLife, seed: int, before: tuple[str, float]) -> tuple[Ended, tuple[str, float]]:
    """Revision `seed + 1` of a device that answers `before` (version, factor) and lives; what it answers after it."""
    draw = random.Random(seed)
    is_bad = draw.random() < 0.3
    factor = 3.0 + seed % 50
    one = made(str(seed + 2), factor=factor, wrong=1.0 if is_bad else 0.0, padding_bytes=PADDING_BYTES)
    killed = draw.choice(("agent at a write", "agent at a time", "agent twice", "worker", "broker"))
    rules = one.probe(atol=0.1)
    if killed.startswith("agent"):
        device.kill()
        device.ask(seed + 1, one, probe=rules)
        for _ in range(2 if killed == "agent twice" else 1):
            _one_life(device, seed, draw, at_write=killed == "agent at a write")
        device.start()
        device.wait_ready()
    else:
        device.ask(seed + 1, one, probe=rules)
        time.sleep(draw.random())
        if killed == "worker":
            device.kill_a_worker(draw.randrange)
        else:
            device.restart_broker()
    report = device.settled(seed + 1)
    after = (one.version, factor) if report.state is RolloutState.COMMITTED else before
    return Ended(seed, killed, report, _wrong(device, report, is_bad, after)), after


def _one_life(device: DeviceLife, seed: int, draw: random.Random, *, at_write: bool) -> None:
    """It lives until it dies at a write of its journal, or for a moment."""
    device.start(die_at=f"write:{draw.randint(1, 9)}" if at_write else "")
    if at_write:
        device.until(lambda: not device.alive or is_settled(device, seed + 1), "neither dead nor settled")
    else:
        time.sleep(2.5 * draw.random())
    device.kill()


def is_settled(device: DeviceLife, revision: int) -> bool:
    found = device.report()
    return found is not None and found.revision == revision and found.state.is_settled


def _wrong(device: DeviceLife, report: ModelReport, is_bad: bool, expected: tuple[str, float]) -> str:
    version, factor = expected
    is_new = report.state is RolloutState.COMMITTED
    if is_new and is_bad:
        return "a bad model was committed"
    if is_new == bool(report.reason):
        return f"{report.state} with the reason {report.reason!r}"
    deployed = device.committed().models.get("double")
    if (deployed.version if deployed else "1") != version:
        return f"committed on disk is {deployed}, reported was {report}"
    device.until(lambda: _answer(device) == (version, 3.0 * factor), "another generation answers than is committed")
    return ""


def _answer(device: DeviceLife) -> tuple[str, float] | None:
    """None while a worker that was killed is started again."""
    try:
        return device.answer()
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 503:
                raise
            return None

"""kill -9 at any point of a rollout: the device ends in the old or the new committed generation, with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.edge.device_life import DeviceLife
from tests.support.edge.rollout_seeds import misfortune
from tests.support.edge.rollouts import made
from tidegate.fleet.reported import RolloutState
from tidegate.rollout.plan import Soak

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.needs_mosquitto, pytest.mark.timeout(600)]
SEEDS = range(10)
EVERY_STATE = (
    "before:planned", "after:planned", "before:verified", "before:staged", "before:loading", "before:warm",
    "before:probed", "before:active", "commit",
)  # fmt: skip


@pytest.fixture
def device(tmp_path: Path) -> Iterator[DeviceLife]:
    with DeviceLife(tmp_path) as device:
        yield device


def test_killed_at_every_state_of_the_journal_it_goes_on_and_commits(device: DeviceLife) -> None:
    one = made("2", factor=5.0, padding_bytes=200_000)
    plan = one.plan(probe=one.probe(atol=1e-3), soak=Soak(0.0, max_exits=20))
    device.ask(1, one, probe=plan.probe, soak=plan.soak)
    for point in EVERY_STATE:
        device.start(die_at=point)
        device.wait_dead()
        assert device.committed().number == (1 if point == "commit" else 0)
    device.start()
    device.wait_ready()
    found = device.settled(1)
    assert (found.state, found.reason, found.running) == (RolloutState.COMMITTED, "", "2")
    assert device.answer() == ("2", 15.0)
    assert device.server.sent_bytes <= 1.1 * plan.size_bytes


def test_killed_while_it_goes_back_or_over_and_over_while_it_loads_it_ends_with_the_old_one(device: DeviceLife) -> None:
    bad = made("2", wrong=1.0)
    device.ask(1, bad, probe=bad.probe(atol=0.1))
    for point in ("before:rolling_back", "before:rolled_back"):
        device.start(die_at=point)
        device.wait_dead()
    device.start(die_at="before:warm")
    device.wait_ready()
    found = device.settled(1)
    assert found.state is RolloutState.ROLLED_BACK
    assert found.reason.startswith("probe_accuracy: ")
    assert device.answer() == ("1", 6.0)
    device.ask(2, made("3", factor=7.0))
    for _ in range(2):
        device.wait_dead()
        device.start(die_at="before:warm")
    device.wait_dead()
    device.start()
    device.wait_ready()
    found = device.settled(2)
    assert found.state is RolloutState.ROLLED_BACK
    assert found.reason.startswith("crash_loop: 3 exits")
    assert (found.running, device.answer(), device.committed().number) == ("1", ("1", 6.0), 0)


def test_ten_rollouts_with_kills_at_random_end_in_the_old_or_the_new_generation_with_a_reason(
    device: DeviceLife,
) -> None:
    answers = ("1", 2.0)
    device.start()
    device.wait_ready()
    for seed in SEEDS:
        ended, answers = misfortune(device, seed, answers)
        assert ended.wrong == "", ended

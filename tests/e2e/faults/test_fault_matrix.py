"""Rows of the fault matrix, short, on every change: what must hold whatever breaks, and is no matter of speed.

The numbers (how soon noticed, how much attained) are judged by `python -m tests.bench.faults`, on the same stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from tests.bench.fault_rows import devices, links
from tests.bench.fault_rows.trial import Trial
from tests.support.faults.matrix import Matrix
from tests.support.faults.matrix_rules import holds_whatever_breaks
from tests.support.faults.matrix_seen import Seen
from tests.support.gateway.casts import paced
from tests.support.mqtt.brokers import MOSQUITTO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
    pytest.mark.timeout(240),
]

TRIALS = {trial.row.number: trial for trial in (*links.TRIALS, *devices.TRIALS)}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(tmp_path_factory.mktemp("matrix"), partial(paced, edges=4), modules=devices.MODULES) as running:
        running.warm_up(2.0)
        yield running


def played(matrix: Matrix, number: str, during_s: float) -> Seen:
    row = TRIALS[number].row
    return matrix.run(replace(row, before_s=1.5, during_s=during_s, after_s=2.5, recover_s=1.0, load=0.4))


def test_a_cloud_link_that_goes_silent_is_distrusted_and_used_again(matrix: Matrix) -> None:
    seen = played(matrix, "4a", 2.0)
    holds_whatever_breaks(seen)
    assert seen.noticed_after("pool/pool") is not None
    assert seen.served_again_after("pool/pool") is not None
    assert {one.split("/")[0] for one in seen.during.served()} >= {"edge"}


def test_when_every_connection_is_reset_no_request_is_told_that_nobody_is_there(matrix: Matrix) -> None:
    seen = played(matrix, "5", 6.0)
    holds_whatever_breaks(seen)
    told = [one for one in seen.during.answers if one.status in (502, 503)]
    assert len(told) <= 0.05 * len(seen.during), seen.during.statuses()


def test_a_killed_edge_is_left_and_comes_back(matrix: Matrix) -> None:
    seen = played(matrix, "7a", 2.0)
    holds_whatever_breaks(seen)
    assert not seen.launches("edge/device-1", seen.broken_at + 1.0, seen.healed_at)
    assert matrix.fleet.targets()["edge/device-1"]["state"] == "ready"


def test_an_edge_that_stands_still_draws_no_traffic(matrix: Matrix) -> None:
    seen = played(matrix, "8", 3.0)
    holds_whatever_breaks(seen)
    assert seen.noticed_after("edge/device-1") is not None
    assert len(seen.launches("edge/device-1", seen.broken_at + 1.0, seen.healed_at)) <= 5


def test_an_edge_that_fails_at_once_is_taken_out(matrix: Matrix) -> None:
    seen = played(matrix, "10", 3.0)
    holds_whatever_breaks(seen)
    failed = [one for one in seen.steps("failed") if one.target == f"edge/{devices.FAILING}"]
    assert 0 < len(failed) <= 20


def test_every_trial_has_a_number_of_its_own() -> None:
    trials: list[Trial] = [*links.TRIALS, *devices.TRIALS]
    assert len(TRIALS) == len(trials)

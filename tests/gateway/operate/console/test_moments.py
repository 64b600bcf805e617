"""The console's past: what is kept, for how long, and what is found at an instant."""

from __future__ import annotations

import json
import random

import pytest

from gateway.operate.console.moments import KEPT, Moments


def kept(*instants: float) -> Moments:
    moments = Moments()
    for at in instants:
        moments.add(at, json.dumps({"at": at}).encode())
    return moments


@pytest.mark.parametrize(
    ("at", "found"),
    [(9.9, None), (10.0, 10.0), (14.9, 10.0), (15.0, 15.0), (1e9, 20.0), (float("-inf"), None)],
)
def test_the_state_at_an_instant_is_the_last_one_that_was_kept_by_then(at: float, found: float | None) -> None:
    snapshot = kept(10.0, 15.0, 20.0).find(at)
    assert (snapshot and json.loads(snapshot)["at"]) == found


def test_only_the_last_moments_are_kept() -> None:
    moments = kept(*(float(second) for second in range(KEPT + 7)))
    assert moments.instants == [float(second) for second in range(7, KEPT + 7)]
    assert moments.newest == KEPT + 6
    assert moments.find(6.0) is None


def test_a_clock_that_jumps_back_leaves_the_history_in_order() -> None:
    moments = kept(10.0, 15.0, 20.0, 12.0, 12.0)
    assert moments.instants == [10.0, 12.0]
    assert kept(10.0, 15.0, 3.0).instants == [3.0]
    assert Moments().newest is None


def test_a_snapshot_of_a_large_fleet_is_kept_in_little_memory() -> None:
    draw = random.Random(1)
    rows = [
        {"id": f"edge/{number}", "health": "well", "timeline_ms": [round(draw.uniform(1, 9), 2) for _ in range(60)]}
        for number in range(25)
    ]
    moments = Moments()
    for at in range(KEPT):
        moments.add(at, json.dumps({"targets": rows}).encode())
    assert moments.size_bytes < 512 * 1024

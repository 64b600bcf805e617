"""A pool at twice its capacity still answers some requests in time, and refuses the others early."""

from __future__ import annotations

import pytest

from tests.support.mqtt.one_device import Told, serve

pytestmark = pytest.mark.slow

KNEE_RPS = 140.0  # about what it answers in time to the last one


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("budget_s", [0.1, 0.25])
def test_at_twice_the_load_as_many_are_in_time_as_ever_and_the_rest_hear_so_at_once(seed: int, budget_s: float) -> None:
    peak = max((serve(load * KNEE_RPS, seed=seed, budget_s=budget_s) for load in (0.8, 1.0, 1.2)), key=goodput)
    twice = serve(2.0 * KNEE_RPS, seed=seed, budget_s=budget_s)
    assert twice.goodput_rps >= 0.95 * peak.goodput_rps
    assert twice.late <= 0.02 * twice.in_time
    assert twice.most_delay_s < 0.010
    assert twice.arrived == twice.in_time + twice.late + twice.refused


def goodput(told: Told) -> float:
    return told.goodput_rps


def test_below_it_no_request_is_refused() -> None:
    told = serve(0.7 * KNEE_RPS)
    assert told.in_time >= 0.999 * told.arrived

"""The standby policy decides when the reserve works; slow start decides the share of a new worker."""

from __future__ import annotations

import pytest

from cloud_pool.core.health.slow_start import FIRST_SHARE, MOST_REST_S, WARM_S, rest_s
from cloud_pool.core.health.standby import Standby


def standby() -> Standby:
    return Standby(wait_s=0.1, calm_s=30.0, busy_ratio=0.7)


def test_it_rests_in_ordinary_times() -> None:
    subject = standby()
    assert not subject.decide(0.0, wait_s=0.1, missing=0, busy_without=0.9)
    assert repr(subject) == "<Standby rests>"


@pytest.mark.parametrize(("wait_s", "missing", "reason"), [(0.11, 0, "wait of 110 ms"), (0.0, 1, "1 out")])
def test_it_is_in_at_once_when_the_wait_is_long_or_a_worker_is_out(wait_s: float, missing: int, reason: str) -> None:
    subject = standby()
    assert subject.decide(0.0, wait_s=wait_s, missing=missing, busy_without=0.0)
    assert subject.reason == reason


def test_it_rests_again_only_after_a_calm_stretch() -> None:
    subject = standby()
    subject.decide(0.0, wait_s=0.0, missing=1, busy_without=0.0)
    assert subject.decide(29.9, wait_s=0.0, missing=0, busy_without=0.5)
    assert not subject.decide(30.0, wait_s=0.0, missing=0, busy_without=0.5)


def test_a_wait_that_is_short_with_its_help_does_not_send_it_away_while_the_others_could_not_do_its_share() -> None:
    subject = standby()
    subject.decide(0.0, wait_s=0.2, missing=0, busy_without=1.5)
    for second in range(1, 200):
        assert subject.decide(float(second), wait_s=0.0, missing=0, busy_without=1.2)
    assert subject.decide(220.0, wait_s=0.06, missing=0, busy_without=0.2), "half of the limit is not calm"
    assert subject.decide(240.0, wait_s=0.0, missing=0, busy_without=0.2)
    assert not subject.decide(250.0, wait_s=0.0, missing=0, busy_without=0.2)


def test_a_new_worker_rests_between_its_first_batches() -> None:
    assert rest_s(0.0, 0.1) == pytest.approx(0.1 * (1 / FIRST_SHARE - 1))
    assert rest_s(WARM_S / 2, 0.1) == pytest.approx(0.1 * (1 / 0.6 - 1))
    assert rest_s(WARM_S, 0.1) == rest_s(1e9, 5.0) == 0.0
    assert rest_s(0.0, 10.0) == MOST_REST_S

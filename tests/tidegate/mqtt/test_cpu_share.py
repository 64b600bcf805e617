"""A share of the time, with bursts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.mqtt.cpu_share import LONGEST_PAUSE_S, DutyCycle


def test_a_burst_is_free_and_what_is_beyond_is_paid_by_a_pause() -> None:
    subject = DutyCycle(0.1, burst_s=0.02)
    assert subject.spend(1.0, 1.01) == 0.0
    assert subject.spend(1.01, 1.03) == pytest.approx(0.08)  # a tenth of these 20 ms has flowed in
    assert repr(subject) == "<DutyCycle 10%, -8 of 20 ms left>"


def test_work_goes_on_after_its_pause_and_has_a_burst_again_after_a_rest() -> None:
    subject = DutyCycle(0.1, burst_s=0.02)
    subject.spend(1.0, 1.03)
    pause_s = subject.spend(1.03, 1.031)
    assert subject.spend(1.031 + pause_s, 1.031 + pause_s) == pytest.approx(0.0, abs=1e-9)
    assert subject.spend(100.0, 100.01) == 0.0


def test_no_pause_is_an_outage() -> None:
    subject = DutyCycle(0.1, burst_s=0.02)
    assert subject.spend(1.0, 60.0) <= LONGEST_PAUSE_S


@pytest.mark.slow
@given(st.lists(st.floats(1e-5, 0.02), min_size=200, max_size=300), st.sampled_from([0.1, 0.25]))
def test_in_the_long_run_work_takes_its_share_and_no_more(pieces: list[float], share: float) -> None:
    subject, now = DutyCycle(share, burst_s=0.05), 0.0
    for piece_s in pieces:
        now += piece_s
        now += subject.spend(now - piece_s, now)
    assert sum(pieces) <= share * now + 0.05 + 0.02

"""Full-jitter backoff doubles its ceiling up to a cap, and starts over when it is reset."""

from __future__ import annotations

from tidegate.runtime.backoff import Backoff


def test_the_ceiling_doubles_with_each_failure_up_to_the_cap() -> None:
    backoff = Backoff(draw=lambda: 1.0, base_s=0.5, cap_s=3.0)
    assert [backoff.next_delay_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_the_wait_is_drawn_from_zero_to_the_ceiling() -> None:
    assert Backoff(draw=lambda: 0.0).next_delay_s() == 0.0
    assert Backoff(draw=lambda: 0.25, base_s=0.8).next_delay_s() == 0.2


def test_a_reset_starts_over() -> None:
    backoff = Backoff(draw=lambda: 1.0, base_s=1.0)
    backoff.next_delay_s()
    backoff.next_delay_s()
    backoff.reset()
    assert backoff.next_delay_s() == 1.0


def test_a_steady_run_forgets_the_failures_before_it() -> None:
    backoff = Backoff(draw=lambda: 1.0, base_s=1.0)
    delays_s = [backoff.next_delay_after_s(ran_s, steady_s=60.0) for ran_s in (0.1, 59.9, 60.0, 3.0)]
    assert delays_s == [1.0, 2.0, 1.0, 2.0]


def test_a_thousand_failures_do_not_overflow() -> None:
    backoff = Backoff(draw=lambda: 1.0)
    assert [backoff.next_delay_s() for _ in range(1000)][-1] == 30.0

"""The pause after a failure of the shared store: how long it is, and what counts as a failure of its own."""

from __future__ import annotations

from gateway.delivery.rollouts.conductor_lease import LEASE_S, MARGIN_S, RENEW_S
from gateway.store.store_pause import FIRST_PAUSE_S, LONGEST_PAUSE_S, StorePause

LATEST, SOONEST = 1.0 - 2**-53, 0.0  # draws


def test_calls_that_met_one_silence_count_as_one_failure() -> None:
    pause = StorePause()
    for number in range(8):
        pause.failed(began_at=10.0 + 0.01 * number, now=10.5 + 0.01 * number, draw=0.5)
    assert pause.length_s == FIRST_PAUSE_S
    assert not pause.is_over(10.99), "and it is counted from the first"
    assert pause.is_over(11.0)


def test_a_call_that_was_let_through_after_the_pause_and_failed_doubles_it() -> None:
    pause, now, lengths = StorePause(), 10.0, []
    for _ in range(6):
        assert pause.is_over(now)
        pause.failed(began_at=now, now=now + 0.5, draw=0.5)
        lengths.append(pause.length_s)
        now += 0.5 + pause.length_s
    assert lengths == [FIRST_PAUSE_S, 1.0, 2.0, 4.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    pause.answered()
    pause.failed(began_at=now, now=now + 0.5, draw=0.5)
    assert pause.length_s == FIRST_PAUSE_S


def test_a_call_that_fails_after_another_was_answered_is_a_failure_whenever_it_began() -> None:
    pause = StorePause()
    pause.failed(began_at=10.0, now=10.5, draw=0.5)
    pause.answered()
    pause.failed(began_at=10.2, now=10.7, draw=0.5)
    assert pause.length_s == FIRST_PAUSE_S
    assert not pause.is_over(11.1)


def test_at_most_one_renewal_of_a_conductors_lease_falls_into_the_first_pause() -> None:
    pause = StorePause()
    pause.failed(began_at=10.0, now=10.0, draw=LATEST)
    assert pause.is_over(10.0 + RENEW_S)
    assert 2.0 * RENEW_S < LEASE_S - MARGIN_S, "the renewal after a missed one comes in time"


def test_the_longest_pause_comes_only_when_a_conductors_lease_has_run_out_anyway() -> None:
    pause, now = StorePause(), 0.0
    while pause.length_s < LONGEST_PAUSE_S:
        pause.failed(began_at=now, now=now, draw=SOONEST)
        failed_at, now = now, now + 0.75 * pause.length_s
    assert failed_at > LEASE_S - MARGIN_S

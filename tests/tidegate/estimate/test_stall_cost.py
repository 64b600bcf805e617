"""When a loop that is held up is a condition, and when it is only a figure."""

from __future__ import annotations

from tidegate.estimate.stall_cost import HOLD_S, WINDOW_S, LoopStall, StallCost


def test_stalls_that_cost_no_deadline_are_no_condition() -> None:
    subject = StallCost()
    for second in range(100):
        subject.stalled(LoopStall(float(second), second + 0.5))
        assert not subject.look(second + 0.6)
    assert subject.evidence == ""


def test_a_deadline_missed_in_time_is_none_either() -> None:
    subject = StallCost()
    subject.stalled(LoopStall(10.0, 10.2))
    subject.missed(10.0, 11.0)  # a fifth of its time
    subject.missed(12.0, 12.3)  # after the stall
    assert not subject.look(12.4)


def test_a_deadline_that_a_stall_ate_a_quarter_of_is_one_also_where_the_miss_is_told_first() -> None:
    subject = StallCost()
    subject.missed(10.0, 10.4)
    subject.stalled(LoopStall(10.1, 10.4, collecting_s=0.2))
    assert subject.look(10.4)
    assert subject.since == 10.4
    assert subject.evidence == (
        "its event loop was held up for 0.3 s of the last minute, 0.3 s at once, 0.2 s of it by garbage collection; "
        "1 deadline was missed by it"
    )
    assert round(subject.held_up_s, 6) == 0.3


def test_it_ends_when_the_last_sign_is_long_enough_ago() -> None:
    subject = StallCost()
    subject.stalled(LoopStall(1.0, 2.5))
    assert subject.look(2.6)
    assert not subject.look(2.6 + HOLD_S - 0.2)
    assert subject.look(2.6 + HOLD_S)
    assert (subject.evidence, subject.held_up_s) == ("", 0.0)


def test_a_whole_second_at_once_is_a_condition_because_requests_aged_in_the_sockets() -> None:
    subject = StallCost()
    subject.stalled(LoopStall(1.0, 2.0))
    assert subject.look(2.0)
    assert "deadline" not in subject.evidence


def test_what_is_older_than_the_window_is_forgotten() -> None:
    subject = StallCost()
    subject.stalled(LoopStall(1.0, 2.5))
    subject.look(2.6)
    subject.stalled(LoopStall(2.5 + WINDOW_S, 4.0 + WINDOW_S))
    subject.look(4.1 + WINDOW_S)
    assert "1.5 s of the last minute" in subject.evidence

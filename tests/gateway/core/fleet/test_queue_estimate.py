"""The ledger: what waits at a target, from our own launches, its promises and its reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.queue_externality import QueuePosition
from gateway.core.fleet.queue_estimate import QueueEstimate
from gateway.core.placement.placer import added_work_s, estimate
from tests.support.gateway.fleets import NOW, fleet_of, report, variant
from tidegate.fleet.offers import VariantOffer


def test_who_is_given_up_while_it_is_computed_still_takes_its_time_there() -> None:
    queue_estimate = QueueEstimate()
    queue_estimate.launch(1, 0.100, NOW)
    queue_estimate.launch(2, 0.050, NOW)
    queue_estimate.accepted(1)
    queue_estimate.abandon(1, NOW + 0.04)
    assert queue_estimate.wait_s(NOW + 0.04) == pytest.approx(0.060 + 0.050)
    assert queue_estimate.in_flight == 1
    queue_estimate.finish(2, NOW + 0.15)
    assert queue_estimate.wait_s(NOW + 0.15) == 0.0


def test_who_is_given_up_while_it_waits_or_was_never_accepted_frees_its_time() -> None:
    queue_estimate = QueueEstimate()
    for attempt in (1, 2, 3):
        queue_estimate.launch(attempt, 0.100, NOW)
        queue_estimate.accepted(attempt)
    queue_estimate.abandon(3, NOW)
    assert queue_estimate.wait_s(NOW) == pytest.approx(0.200)
    silent = QueueEstimate()
    silent.launch(1, 0.100, NOW)
    silent.abandon(1, NOW + 0.05)
    assert silent.wait_s(NOW + 0.05) == 0.0


def test_who_is_given_up_when_it_should_have_been_done_leaves_nothing() -> None:
    queue_estimate = QueueEstimate()
    queue_estimate.launch(1, 0.100, NOW)
    queue_estimate.accepted(1)
    queue_estimate.abandon(1, NOW + 0.2)
    assert queue_estimate.wait_s(NOW + 0.2) == 0.0


def test_own_launches_count_at_once_and_leave_with_their_end() -> None:
    queue_estimate = QueueEstimate()
    queue_estimate.launch(1, 0.100, NOW)
    queue_estimate.launch(2, 0.100, NOW)

    assert queue_estimate.wait_s(NOW) == pytest.approx(0.200)
    assert queue_estimate.in_flight == 2
    queue_estimate.finish(1, NOW + 0.1)
    assert queue_estimate.wait_s(NOW + 0.1) == pytest.approx(0.100)
    queue_estimate.finish(2, NOW + 0.2)
    assert queue_estimate.wait_s(NOW + 0.2) == 0.0
    assert "0 in flight" in repr(queue_estimate)


def test_the_head_of_the_queue_works_its_way_down_but_not_below_the_rest() -> None:
    queue_estimate = QueueEstimate()
    queue_estimate.launch(1, 0.100, NOW)
    queue_estimate.launch(2, 0.050, NOW)

    assert queue_estimate.wait_s(NOW + 0.040) == pytest.approx(0.110)
    assert queue_estimate.wait_s(NOW + 9.0) == pytest.approx(0.050)  # overdue: nothing is known of how much is to come


def works(queue_estimate: QueueEstimate) -> list[float]:
    return [work_s for work_s, _ in queue_estimate.queue()]


@pytest.mark.parametrize("in_order", [True, False], ids=["by deadline", "as it came"])
def test_what_is_computed_next_is_what_the_target_takes_next(in_order: bool) -> None:
    queue_estimate = QueueEstimate(in_order=in_order)
    for attempt, (work_s, due_s) in enumerate([(0.1, 1.0), (0.3, 3.0), (0.2, 2.0)]):
        queue_estimate.launch(attempt, work_s, NOW, QueuePosition(NOW + due_s, NOW + due_s))
    assert works(queue_estimate)[0] == 0.1, "it found an idle target"
    queue_estimate.launch(3, 0.05, NOW + 0.05, QueuePosition(NOW + 0.5, NOW + 0.5))
    assert works(queue_estimate)[0] == 0.1, "what is computed is not interrupted"
    queue_estimate.finish(3, NOW + 0.06)
    assert queue_estimate.wait_s(NOW + 0.08) == pytest.approx(0.52), "one that waited and left is no end of the other"
    queue_estimate.finish(0, NOW + 0.1, computed=True)
    assert works(queue_estimate) == ([0.2, 0.3] if in_order else [0.3, 0.2])
    queue_estimate.launch(4, 0.05, NOW + 0.1, QueuePosition(NOW + 0.5, NOW + 0.5))
    head_s = 0.2 if in_order else 0.3
    assert queue_estimate.wait_s(NOW + 9.0) == pytest.approx(0.55 - head_s)


def test_a_generation_is_no_head_of_the_queue() -> None:
    queue_estimate = QueueEstimate()
    queue_estimate.launch(1, 0.0, NOW)
    queue_estimate.launch(2, 0.3, NOW, QueuePosition(NOW + 3.0, NOW + 3.0))
    queue_estimate.launch(3, 0.2, NOW, QueuePosition(NOW + 2.0, NOW + 2.0))
    queue_estimate.launch(4, 0.1, NOW, QueuePosition(NOW + 1.0, NOW + 1.0))
    assert works(queue_estimate)[0] == 0.3
    queue_estimate.finish(2, NOW + 0.3, computed=True)
    assert works(queue_estimate)[0] == 0.1


def test_an_answer_from_one_that_was_thought_to_wait_says_that_the_target_is_free() -> None:
    queue_estimate = QueueEstimate()
    for attempt in range(3):
        queue_estimate.launch(attempt, 0.1 * (attempt + 1), NOW, QueuePosition(NOW - attempt, NOW + 1.0))
    queue_estimate.finish(1, NOW + 0.2, computed=True)
    assert works(queue_estimate) == pytest.approx([0.3, 0.1])


def test_a_pool_adds_half_a_call_once_for_the_one_that_is_running() -> None:
    queue_estimate = QueueEstimate(batches=True)
    assert queue_estimate.wait_s(NOW) == 0.0
    queue_estimate.launch(1, 0.010, NOW, call_s=0.040)
    assert queue_estimate.wait_s(NOW) == pytest.approx(0.010 + 0.020)
    queue_estimate.launch(2, 0.010, NOW, call_s=0.060)
    assert queue_estimate.wait_s(NOW) == pytest.approx(0.020 + 0.030)
    for attempt in (1, 2):
        queue_estimate.finish(attempt, NOW)
    assert queue_estimate.wait_s(NOW) == 0.0


def test_work_at_an_edge_is_all_of_the_compute_and_at_a_pool_what_it_adds_to_a_call() -> None:
    table = VariantOffer("fp32", "fp32", ((1.0, 0.040), (101.0, 0.050)))
    fleet = fleet_of(edge_a=table, pool_a=table, pool_b=variant(compute_s=0.040))
    work = {}
    for one in fleet.offered("minilm", "1"):
        candidate = estimate(one, 51.0, NOW)
        work[one.target.id] = added_work_s(candidate) / candidate.compute_s
    assert work["edge/a"] == 1.0
    assert work["pool/a"] == pytest.approx(0.005 / 0.045, rel=0.05)
    assert work["pool/b"] == pytest.approx(0.05), "nothing is free, even where the table says so"


def test_others_work_is_known_from_reports_and_fades() -> None:
    queue_estimate = QueueEstimate()
    assert queue_estimate.report(report(0.6), "link", NOW)

    assert queue_estimate.wait_s(NOW) == pytest.approx(0.6)
    assert 0.0 < queue_estimate.wait_s(NOW + 0.3) < 0.3
    assert queue_estimate.wait_s(NOW + 2.0) == 0.0


def test_what_was_acknowledged_is_in_the_next_report_and_what_was_not_adds_to_it() -> None:
    queue_estimate = QueueEstimate()
    for attempt, work_s in ((1, 0.100), (2, 0.050), (3, 0.020)):
        queue_estimate.launch(attempt, work_s, NOW)
    queue_estimate.accepted(1)
    queue_estimate.accepted(1)
    queue_estimate.accepted(99)
    queue_estimate.report(report(0.300, sequence=1), "link", NOW)
    assert queue_estimate.wait_s(NOW) == pytest.approx(0.370)

    queue_estimate.accepted(2)
    assert queue_estimate.wait_s(NOW) == pytest.approx(0.370), "the report before its ack says nothing of it"
    queue_estimate.report(report(0.350, sequence=2), "link", NOW)
    assert queue_estimate.wait_s(NOW) == pytest.approx(0.370)

    queue_estimate.finish(1, NOW)
    assert queue_estimate.wait_s(NOW) == pytest.approx(0.370), "what it did to the queue is for the next report to say"
    queue_estimate.finish(3, NOW)
    assert queue_estimate.wait_s(NOW) == pytest.approx(0.350)


def test_a_promise_that_differs_from_what_was_thought_corrects_the_wait_by_as_much() -> None:
    queue_estimate = QueueEstimate()
    queue_estimate.launch(1, 0.100, NOW)
    queue_estimate.report(report(0.300), "link", NOW)
    queue_estimate.apply_ack(0.250, NOW + 0.010)
    assert queue_estimate.wait_s(NOW + 0.010) == pytest.approx(0.65, abs=0.02)
    queue_estimate.apply_ack(-0.5, NOW + 0.010)
    assert queue_estimate.wait_s(NOW + 0.010) == pytest.approx(0.15, abs=0.02)
    queue_estimate.apply_ack(-9.0, NOW + 0.010)
    assert queue_estimate.wait_s(NOW + 0.010) == pytest.approx(0.09), "what we have there ourselves is a floor"
    assert queue_estimate.reported_at == NOW, "an ack is no report"


@pytest.mark.parametrize("batches", [False, True])
def test_a_promise_that_says_what_was_thought_changes_nothing_however_often(batches: bool) -> None:
    queue_estimate = QueueEstimate(batches=batches)
    queue_estimate.launch(1, 0.010, NOW, call_s=0.040)
    queue_estimate.report(report(0.200), "link", NOW)
    before_s = queue_estimate.wait_s(NOW)
    for _ in range(9):
        queue_estimate.apply_ack(0.0, NOW)
    assert queue_estimate.wait_s(NOW) == pytest.approx(before_s)


@pytest.mark.parametrize("word_s", [float("inf"), 1e12])
def test_an_absurd_promise_is_bounded_and_forgotten(word_s: float) -> None:
    queue_estimate = QueueEstimate()
    queue_estimate.apply_ack(word_s, NOW)
    assert queue_estimate.wait_s(NOW) == pytest.approx(60.0)
    assert queue_estimate.wait_s(NOW + 1.5) == 0.0


def test_an_idle_report_does_not_hide_what_we_sent_ourselves() -> None:
    queue_estimate = QueueEstimate()
    queue_estimate.launch(1, 0.100, NOW)
    queue_estimate.report(report(0.0), "mqtt", NOW)
    assert queue_estimate.wait_s(NOW) == pytest.approx(0.100)


def test_reports_are_ordered_per_road_and_epochs_over_all_roads() -> None:
    queue_estimate = QueueEstimate()
    assert queue_estimate.report(report(0.1, sequence=5), "link", NOW)
    assert not queue_estimate.report(report(0.9, sequence=5), "link", NOW)
    assert queue_estimate.report(report(0.2, sequence=1), "mqtt", NOW)
    assert queue_estimate.report(report(0.3, sequence=1, epoch=2), "link", NOW)
    assert not queue_estimate.report(report(0.9, sequence=9, epoch=1), "mqtt", NOW)
    assert queue_estimate.load == report(0.3, sequence=1, epoch=2)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("lfrac"), st.floats(0.0, 1.0), st.floats(0.0, 0.5)), max_size=60))
def test_waits_are_never_negative_and_an_empty_ledger_is_exactly_empty(
    steps: list[tuple[str, float, float]],
) -> None:
    queue_estimate, now, under_way = QueueEstimate(batches=len(steps) % 2 == 0), NOW, list[int]()
    for key, (step, size_s, pause_s) in enumerate(steps):
        now += pause_s
        if step == "l":
            queue_estimate.launch(key, size_s, now, call_s=pause_s)
            under_way.append(key)
        elif step == "f" and under_way:
            queue_estimate.finish(under_way.pop(key % len(under_way)), now)
        elif step == "r":
            queue_estimate.report(report(size_s, sequence=key + 1), "link", now)
        elif step == "a" and under_way:
            queue_estimate.accepted(under_way[key % len(under_way)])
        elif step == "c":
            queue_estimate.apply_ack(size_s - 0.5, now)
        assert queue_estimate.wait_s(now) >= 0.0
        assert queue_estimate.in_flight == len(under_way)
    for left in under_way:
        queue_estimate.finish(left, now)
    assert queue_estimate.wait_s(now + 2.0) == 0.0

"""Where a request's time went: stages that follow each other and add up, whatever happened to it."""

from __future__ import annotations

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.core.history.recorder import RequestRecord
from gateway.core.history.waterfall import Waterfall, waterfall
from tests.support.gateway.flowns import answered, given, request_record, went


def names(falls: Waterfall) -> list[str]:
    return [stage.name for stage in falls.path]


def took_ms(falls: Waterfall) -> dict[str, float]:
    return {stage.name: round(1e3 * stage.took_s, 3) for stage in falls.path}


def test_an_answer_is_its_gateways_stages_the_links_two_ways_and_what_the_target_told() -> None:
    falls = waterfall(request_record())
    assert took_ms(falls) == {
        "admit": 0.5, "classify": 0.5, "place": 1.0,
        "link out": 2.0, "queue": 20.0, "compute": 30.0, "link back": 8.0,
        "finish": 0.5,
    }  # fmt: skip
    assert falls.unaccounted_s == pytest.approx(0.0)


def test_the_wait_for_a_batch_is_told_apart_from_the_queue_it_is_part_of() -> None:
    notes = answered(0, "pool/main", 0.002, stages={"queue": 0.02, "batch_wait": 0.015, "compute": 0.03})
    notes[-1] = replace(notes[-1], seconds=0.010)
    assert took_ms(waterfall(request_record(notes=notes)))["queue"] == 5.0
    assert took_ms(waterfall(request_record(notes=notes)))["batch wait"] == 15.0


def test_a_hedge_that_won_had_to_wait_for_the_first_attempt_and_both_are_bars() -> None:
    notes = [*went(0, "edge/a", 0.002, ends=0.263, what="cancelled"), *answered(1, "pool/main", 0.2)]
    falls = waterfall(request_record(notes=notes, end=given("pool/main", 1, hedged=True), elapsed_s=0.263))
    assert took_ms(falls)["before"] == 198.0
    assert falls.path[3].words == "attempt 1 at edge/a cancelled"
    assert [(bar.target, bar.end, bar.why) for bar in falls.bars] == [
        ("edge/a", "cancelled", "cheapest"), ("pool/main", "answered", "hedge"),
    ]  # fmt: skip
    assert [stage.name for stage in falls.bars[0].stages] == ["link out", "unanswered"]


def test_a_target_that_claims_more_than_there_was_leaves_a_negative_remainder_by_name() -> None:
    notes = answered(0, "edge/a", 0.002, stages={"queue": 0.05, "compute": 0.05})
    falls = waterfall(request_record(notes=notes))
    assert falls.unaccounted_s == pytest.approx(-0.040)
    assert took_ms(falls)["compute"] == 50.0, "nothing is stretched to fit"


def test_a_foreign_servers_time_is_one_stage() -> None:
    falls = waterfall(request_record(notes=answered(0, "pool/triton", 0.002, stages={}, acked_s=None)))
    assert (took_ms(falls)["target"], took_ms(falls)["link out"]) == (50.0, 5.0)
    assert falls.unaccounted_s == pytest.approx(0.0)


def test_one_that_expired_shows_what_nobody_answered() -> None:
    silent = waterfall(
        request_record(notes=went(0, "edge/a", 0.002, acked_s=None), end="deadline_exceeded: late", elapsed_s=1.0)
    )
    assert took_ms(silent)["unanswered"] == 998.0
    held = waterfall(request_record(notes=[], end="nothing_alive: nobody", elapsed_s=0.02))
    assert took_ms(held)["held"] == 18.0
    turned_away = waterfall(request_record(notes=[], end="overloaded: shed", elapsed_s=0.002))
    assert names(turned_away) == ["admit", "classify", "place"]


attempts = st.lists(
    st.tuples(
        st.floats(0.002, 0.5), st.floats(0.0, 0.5), st.sampled_from(["answered", "failed", "cancelled", "pending"])
    ),
    max_size=4,
)


def flight(told: list[tuple[float, float, str]], more_s: float, queue_s: float) -> RequestRecord:
    notes, ends_at, winner, launched_at = [], 0.002, None, 0.002
    for number, (gap_s, took_s, end) in enumerate(told):
        launched_at += gap_s
        if end == "answered":
            notes += answered(number, "edge/a", launched_at, took_s=took_s, stages={"queue": queue_s, "compute": 0.01})
            winner = number
        elif end == "pending":
            notes += went(number, "edge/a", launched_at)
        else:
            notes += went(number, "edge/a", launched_at, ends=launched_at + took_s, what=end)
        ends_at = max(ends_at, launched_at + took_s)
    end_of_it = "deadline_exceeded: late" if winner is None else given("edge/a", winner)
    return request_record(notes=notes, end=end_of_it, elapsed_s=ends_at + more_s)


@pytest.mark.slow
@for_all(attempts, st.floats(0.0, 0.1), st.floats(0.0, 0.1))
def test_stages_and_what_is_not_accounted_for_always_make_up_the_latency(
    told: list[tuple[float, float, str]], more_s: float, queue_s: float
) -> None:
    one = flight(told, more_s, queue_s)
    falls = waterfall(one)
    assert sum(stage.took_s for stage in falls.path) + falls.unaccounted_s == pytest.approx(one.elapsed_s)
    assert len(falls.bars) == len(told)
    if falls.unaccounted_s > -1e-9:
        assert falls.unaccounted_s == pytest.approx(0.0, abs=1e-9), "only a target's own claims can be too much"

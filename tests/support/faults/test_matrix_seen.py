"""What the fault matrix reckons from what it saw."""

from __future__ import annotations

from collections import Counter

import pytest

from gateway.core.estimate.link_estimate import LinkEstimate
from tests.bench.open_loop import Answer
from tests.support.faults.matrix_seen import Flight, Seen, doubted_after


def answer(number: int, at: float, units: float, status: int = 200) -> Answer:
    return Answer(number, at, "document", units, 1.0, status, 0.5)


def flight(number: int, at: float, units: float, *, edge_s: float, trust: float = 1.0) -> Flight:
    expected = {f"edge/{n}": edge_s for n in range(4)} | {"pool/main": 0.01}
    return Flight(number, at, units, "ok", 0.5, (), {"pool/main": trust}, expected, "", 0.0)


def seen(answers: list[Answer], flights: list[Flight]) -> Seen:
    return Seen("row", answers, (0.0, 1.0, 2.0, 3.0), flights, [], Counter(), {}, 1, 0.0, [])


@pytest.mark.parametrize("looked_after_s", [0.15, 0.3, 1.0])
def test_doubt_is_reckoned_back_to_when_an_even_chance_was_left(looked_after_s: float) -> None:
    link = LinkEstimate()
    for number in range(40):
        link.record(0.020, number / 100)
    trust = link.answers_after(looked_after_s, 1.0)
    assert trust < 0.5
    even_s = doubted_after(looked_after_s, trust)
    assert link.answers_after(even_s, 1.0) == pytest.approx(0.5, abs=0.001)


def test_without_any_trust_it_is_known_only_from_then_on() -> None:
    assert doubted_after(0.2, 0.0) == 0.2


def test_notice_is_taken_by_the_earliest_doubt_and_not_before_the_last_trust() -> None:
    flights = [flight(3, 1.20, 16, edge_s=0.1, trust=0.4), flight(2, 1.19, 16, edge_s=0.1, trust=0.9)]
    assert seen([], flights).noticed_after("pool/main") == pytest.approx(0.19)


def test_only_as_many_count_as_edges_can_do_in_the_time_there_is() -> None:
    # given a second, four edges that need 0.4 s each for one of these: ten fit
    answers = [answer(number, 1.0 + number / 100, 100, 200 if number < 9 else 429) for number in range(20)]
    flights = [flight(number, 1.0 + number / 100, 100, edge_s=0.4) for number in range(5)]
    assert seen(answers, flights).in_time_of_feasible(1.0, 2.0, 512) == pytest.approx(0.9)


def test_what_no_edge_can_do_in_time_does_not_count() -> None:
    answers = [answer(0, 1.1, 100), answer(1, 1.2, 400, 504), answer(2, 1.3, 600, 429)]
    flights = [flight(0, 1.1, 100, edge_s=0.4), flight(1, 1.2, 400, edge_s=1.6)]
    assert seen(answers, flights).in_time_of_feasible(1.0, 2.0, 512) == 1.0

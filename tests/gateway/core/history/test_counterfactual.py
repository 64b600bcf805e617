"""What would have been better: told from what others met, and not told where nobody can know."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.core.history.counterfactual import Counterfactual, counterfactual_of
from gateway.core.history.recorder import RequestRecord
from gateway.operate.explanation import explanation_json
from tests.support.gateway.flowns import answered, given, request_record, went

LATE = "deadline_exceeded: no answer in time"


def late(number: int = 1) -> RequestRecord:
    """Sent to edge/a, where nothing came of it."""
    return request_record(number=number, notes=went(0, "edge/a", 0.002), end=LATE, elapsed_s=1.0)


def other(
    number: int, target: str, *, after_s: float = 0.05, queue_s: float = 0.02, link_s: float = 0.01
) -> RequestRecord:
    """Somebody who was answered there at about that time; compute as predicted."""
    stages = {"queue": queue_s, "compute": 0.002 if target == "pool/main" else 0.010}
    notes = answered(0, target, 0.002, took_s=link_s + sum(stages.values()), stages=stages)
    return request_record(number=number, notes=notes, end=given(target), shift_s=after_s)


def says(found: Counterfactual, target: str) -> str:
    return next(one.says for one in found.alternatives if one.target == target)


def test_of_a_late_one_the_cheapest_that_others_were_answered_by_in_time_is_named() -> None:
    others = [other(2, "edge/b"), other(3, "edge/b", after_s=-0.05), other(4, "pool/main"), other(5, "pool/main")]
    found = counterfactual_of(late(), [late(), *others])
    assert (found.verdict, found.better and found.better.target) == ("better", "edge/b")
    assert found.better is not None and found.better.takes_s == pytest.approx(0.04)
    assert says(found, "pool/main") == "in time"
    assert {one.target for one in found.alternatives} == {"edge/b", "pool/main"}, "not the one that was tried"


def test_where_nobody_was_sent_it_cannot_be_known() -> None:
    found = counterfactual_of(late(), [late()])
    assert (found.verdict, found.better) == ("unknown", None)
    assert {one.says for one in found.alternatives} == {"unknown"}
    assert all(one.chance is None and one.takes_s is None for one in found.alternatives)
    told = explanation_json(late(), [late()])["hindsight"]
    assert told["sentence"].startswith("It cannot be known")


def test_what_was_long_before_or_long_after_says_nothing() -> None:
    others = [other(2, "edge/b", after_s=4.0), other(3, "edge/b", after_s=-4.0), other(4, "edge/b", after_s=30.0)]
    assert says(counterfactual_of(late(), others), "edge/b") == "unknown"


def test_others_who_waited_too_long_or_failed_there_say_that_it_would_have_been_late_as_well() -> None:
    slow = [other(number, "edge/b", queue_s=3.0) for number in (2, 3)]
    lost = went(0, "pool/main", 0.0, ends=0.01, what="failed", words="unreachable: gone")
    failed = [request_record(number=n, notes=lost, end="unreachable: gone") for n in (4, 5)]
    found = counterfactual_of(late(), [*slow, *failed])
    assert (found.verdict, says(found, "edge/b"), says(found, "pool/main")) == ("none", "late", "late")


def test_mixed_fortunes_are_open_and_nothing_is_recommended_on_them() -> None:
    others = [other(2, "edge/b"), other(3, "edge/b", queue_s=3.0)]
    found = counterfactual_of(late(), others)
    assert (says(found, "edge/b"), found.better, found.verdict) == ("open", None, "none")


def test_whoever_was_given_up_early_is_no_evidence_and_after_the_budget_is_a_miss() -> None:
    early = [request_record(number=n, notes=went(0, "edge/b", 0.0, ends=0.1, what="cancelled")) for n in (2, 3)]
    long = [
        request_record(number=n, notes=went(0, "edge/b", 0.0, ends=1.5, what="cancelled"), elapsed_s=2.0)
        for n in (4, 5)
    ]
    assert says(counterfactual_of(late(), early), "edge/b") == "unknown"
    assert says(counterfactual_of(late(), long), "edge/b") == "late"


def test_one_that_was_in_time_is_only_bettered_by_who_was_cheaper() -> None:
    dear = request_record(notes=answered(0, "pool/main", 0.002), end=given("pool/main"))
    cheap_others = [other(2, "edge/b"), other(3, "edge/b")]
    assert counterfactual_of(dear, cheap_others).better is not None
    cheap = request_record()
    assert (counterfactual_of(cheap, [other(2, "pool/main"), other(3, "pool/main")]).verdict) == "best"


def test_how_much_longer_others_computed_than_predicted_is_expected_of_this_one_too() -> None:
    throttled = [other(number, "edge/b") for number in (2, 3)]
    heavy = []
    for one in throttled:
        *before, end = one.notes
        heavy.append(replace(one, notes=(*before, replace(end, stages={"queue": 0.02, "compute": 2.0}))))
    found = counterfactual_of(late(), heavy)
    assert says(found, "edge/b") == "late", "its 10 ms would have been two seconds there"


def test_of_a_path_that_was_silent_by_then_only_what_was_sent_there_since_counts() -> None:
    one = late()
    assert one.decision is not None
    rows = list(one.decision.rows)
    place = [target for target, *_ in rows].index("edge/b")
    rows[place] = (*rows[place][:8], 0.02, *rows[place][9:])  # its trust
    doubted = replace(one, decision=replace(one.decision, rows=rows))
    assert doubted.decision is not None and doubted.decision.candidates[place].trust == 0.02
    before = [other(number, "edge/b", after_s=-0.1) for number in (2, 3, 4)]
    since = [other(number, "edge/b", after_s=0.1) for number in (5, 6)]
    assert says(counterfactual_of(one, before), "edge/b") == "in time"
    assert says(counterfactual_of(doubted, before), "edge/b") == "unknown"
    assert says(counterfactual_of(doubted, [*before, *since]), "edge/b") == "in time"


def test_one_that_was_never_placed_has_nothing_to_compare() -> None:
    turned_away = replace(late(), decision=None, notes=(), reasons=())
    assert counterfactual_of(turned_away, [other(2, "edge/b")]) == Counterfactual("unplaced", None, ())

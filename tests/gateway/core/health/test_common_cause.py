"""Targets of a tier in which two have stalled are doubted until they answer, or until the stalls are old."""

from __future__ import annotations

import pytest

from gateway.core.health.common_cause import RECENT_S, SILENT_S, CommonCause
from gateway.core.health.progress import ProgressWatch

NOW = 100.0


def siblings(*names: str) -> tuple[CommonCause, dict[str, ProgressWatch]]:
    cause, watches = CommonCause(), {name: ProgressWatch() for name in names}
    for name, watch in watches.items():
        cause.watch(name, watch)
    return cause, watches


def struck(cause: CommonCause, watches: dict[str, ProgressWatch], name: str, now: float = NOW) -> None:
    """It was to answer 0.1 s ago, and is found to have stalled."""
    watches[name].due(1, now - 0.1, now - 0.2)
    cause.stalled(name, now)


def test_one_stall_says_nothing_of_the_others() -> None:
    cause, watches = siblings("a", "b", "c")
    struck(cause, watches, "a")
    assert cause.trust("b", NOW) == 1.0


def test_two_stalls_cast_doubt_on_whoever_has_not_answered_since() -> None:
    cause, watches = siblings("a", "b", "c", "d")
    watches["c"].answered(1, NOW - 0.5)
    watches["d"].answered(1, NOW - 0.01)
    struck(cause, watches, "a")
    struck(cause, watches, "b")
    assert cause.trust("c", NOW) == pytest.approx(2 / 5), "one was heard, two have stalled"
    assert cause.trust("d", NOW) == 1.0, "it has answered since"
    assert cause.trust("a", NOW) == 1.0, "of that its breaker speaks"
    watches["c"].answered(2, NOW + 0.1)
    assert cause.trust("c", NOW + 0.1) == 1.0


def test_a_doubt_ends_with_the_stalls() -> None:
    cause, watches = siblings("a", "b", "c", "d")
    struck(cause, watches, "a")
    struck(cause, watches, "b")
    watches["d"].answered(1, NOW + 0.1)
    assert cause.trust("c", NOW + 0.2) < 0.5 and cause.trust("d", NOW + 0.2) == 1.0
    assert cause.trust("c", NOW + RECENT_S + 0.1) == 1.0
    assert not cause.stalls
    struck(cause, watches, "a", NOW + 10.0)
    struck(cause, watches, "b", NOW + 10.0)
    watches["b"].answered(2, NOW + 10.1)
    assert cause.trust("c", NOW + 10.2) == 1.0, "one that answers has recovered"


def test_who_was_removed_is_no_evidence() -> None:
    cause, watches = siblings("a", "b", "c")
    struck(cause, watches, "a")
    struck(cause, watches, "b")
    cause.forget("a")
    assert cause.trust("c", NOW + 0.1) == 1.0
    cause.stalled("a", NOW + 0.1)
    struck(cause, watches, "c")
    cause.forget("b")
    assert list(cause.stalls) == ["c"]


def test_while_nobody_answers_a_doubt_lasts_longer() -> None:
    cause, watches = siblings("a", "b", "c")
    struck(cause, watches, "a")
    struck(cause, watches, "b")
    assert cause.trust("c", NOW + RECENT_S + 0.1) < 0.5
    assert cause.trust("c", NOW + SILENT_S + 0.1) == 1.0
    assert not cause.stalls


def test_a_new_process_is_doubted_as_its_siblings_are_until_one_of_them_answers() -> None:
    cause, watches = siblings("a", "b", "c")
    struck(cause, watches, "a")
    struck(cause, watches, "b")
    fresh = ProgressWatch()
    cause.watch("a", fresh)
    assert cause.trust("a", NOW + 0.1) == cause.trust("c", NOW + 0.1) < 0.5
    fresh.answered(1, NOW + 0.2)
    assert cause.trust("a", NOW + 0.3) == cause.trust("c", NOW + 0.3) == 1.0


def owing(*names: str, now: float = NOW) -> tuple[CommonCause, dict[str, ProgressWatch]]:
    """Siblings of which those named were to answer 0.1 s ago."""
    cause, watches = siblings("a", "b", "c", "d")
    for name in names:
        watches[name].due(1, now - 0.1, now - 0.2)
    return cause, watches


def test_a_tier_that_is_silent_as_a_whole_is_doubted_before_any_of_it_is_known_to_have_stalled() -> None:
    cause, _ = owing("a", "b", "c")
    cause.owes(NOW)
    assert {name: cause.trust(name, NOW) for name in "abcd"} == dict.fromkeys("abcd", pytest.approx(1 / 5))


def test_any_answer_ends_the_doubt_of_a_silence() -> None:
    cause, watches = owing("a", "b", "c")
    cause.owes(NOW)
    assert cause.trust("d", NOW) < 0.5
    watches["b"].answered(1, NOW + 0.05)
    assert cause.trust("d", NOW + 0.08) == cause.trust("a", NOW + 0.08) == 1.0
    assert not cause.stalls


def test_where_one_answers_or_only_two_owe_nothing_is_said_of_all() -> None:
    cause, watches = owing("a", "b", "c")
    watches["d"].answered(1, NOW - 0.02)
    cause.owes(NOW)
    assert not cause.stalls
    cause, _ = owing("a", "b")
    cause.owes(NOW)
    assert not cause.stalls


def test_one_that_is_found_to_have_stalled_after_all_is_left_to_its_breaker() -> None:
    cause, _ = owing("a", "b", "c")
    cause.owes(NOW)
    cause.stalled("a", NOW + 0.1)
    assert cause.trust("a", NOW + 0.1) == 1.0 and cause.trust("b", NOW + 0.1) < 0.5

"""Targets of a tier in which two have stalled are doubted until they answer, or until the stalls are old."""

from __future__ import annotations

import pytest

from gateway.core.health.common_cause import RECENT_S, CommonCause
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
    cause, watches = siblings("a", "b", "c")
    struck(cause, watches, "a")
    struck(cause, watches, "b")
    assert cause.trust("c", NOW) < 0.5
    assert cause.trust("c", NOW + RECENT_S + 0.1) == 1.0
    assert not cause.stalls
    struck(cause, watches, "a", NOW + 10.0)
    struck(cause, watches, "b", NOW + 10.0)
    watches["b"].answered(2, NOW + 10.1)
    assert cause.trust("c", NOW + 10.2) == 1.0, "one that answers has recovered"


def test_who_was_removed_or_is_a_new_process_is_no_evidence() -> None:
    cause, watches = siblings("a", "b", "c")
    struck(cause, watches, "a")
    struck(cause, watches, "b")
    cause.forget("a")
    assert cause.trust("c", NOW + 0.1) == 1.0
    cause.stalled("a", NOW + 0.1)
    struck(cause, watches, "c")
    cause.watch("b", ProgressWatch())
    assert list(cause.stalls) == ["c"]

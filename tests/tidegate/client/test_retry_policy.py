"""When a client tries again."""

from __future__ import annotations

import pytest

from tidegate.client.retry_policy import RetryPolicy
from tidegate.outcome import (
    BadAnswer,
    DeadlineExceeded,
    Disconnected,
    InvalidRequest,
    NothingAlive,
    Overloaded,
    ServeError,
    Unreachable,
)

POLICY = RetryPolicy(tries=3, first_wait_s=0.1, longest_wait_s=1.0)


@pytest.mark.parametrize("error", [InvalidRequest("no"), DeadlineExceeded("late"), BadAnswer("odd"), ServeError("bug")])
def test_what_another_try_cannot_help_is_not_tried_again(error: ServeError) -> None:
    assert POLICY.wait_s(error, 1, None, 0.5) is None


@pytest.mark.parametrize(
    ("retry_after_s", "draw", "waits_s"), [(0.2, 0.0, 0.2), (0.2, 0.5, 0.21), (0.0, 0.9, 0.0), (1.5, 0.0, None)]
)
def test_a_refusal_is_taken_at_its_word_and_a_little_more(
    retry_after_s: float, draw: float, waits_s: float | None
) -> None:
    found = POLICY.wait_s(Overloaded("full", retry_after_s=retry_after_s), 1, None, draw)
    assert found == (None if waits_s is None else pytest.approx(waits_s))


@pytest.mark.parametrize(("failed", "waits_s"), [(1, 0.05), (2, 0.1), (3, None)])
def test_without_a_word_waits_double_and_tries_end(failed: int, waits_s: float | None) -> None:
    for error in (NothingAlive("none"), Unreachable("gone"), Disconnected("cut")):
        found = POLICY.wait_s(error, failed, None, 0.5)
        assert found == (None if waits_s is None else pytest.approx(waits_s))


def test_no_try_begins_behind_the_budget() -> None:
    error = Overloaded("full", retry_after_s=0.3)
    assert POLICY.wait_s(error, 1, 0.31, 0.0) == pytest.approx(0.3)
    assert POLICY.wait_s(error, 1, 0.3, 0.0) is None


@pytest.mark.parametrize("wrong", [{"tries": 0}, {"first_wait_s": -1.0}, {"longest_wait_s": -0.1}])
def test_a_policy_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="tries has to be"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]

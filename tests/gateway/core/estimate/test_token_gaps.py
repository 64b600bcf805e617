"""The usual gap between two tokens, by what has come."""

from __future__ import annotations

import pytest

from gateway.core.estimate.token_gaps import FEWEST, MOST, TokenGaps


def gaps_of(*gaps_s: float) -> TokenGaps:
    gaps = TokenGaps()
    for gap_s in gaps_s:
        gaps.record(gap_s)
    return gaps


def test_nothing_is_said_before_a_few_gaps_are_known() -> None:
    assert gaps_of(*[0.01] * (FEWEST - 1)).p99_s is None
    assert gaps_of(*[0.01] * FEWEST).p99_s is not None


@pytest.mark.parametrize("gap_s", [0.0002, 0.002, 0.0123, 0.25, 3.0])
def test_a_percentile_is_at_most_a_fifth_too_long(gap_s: float) -> None:
    p99_s = gaps_of(*[gap_s] * 100).p99_s
    assert p99_s is not None and gap_s <= p99_s <= 1.2 * gap_s * 1.0001


def test_one_in_a_hundred_is_passed_over_and_two_are_not() -> None:
    assert gaps_of(*[0.01] * 990, *[1.0] * 5).p99_s == gaps_of(*[0.01] * 100).p99_s
    p99_s = gaps_of(*[0.01] * 900, *[1.0] * 60).p99_s
    assert p99_s is not None and p99_s >= 1.0


def test_what_is_shorter_or_longer_than_any_bin_is_in_the_first_or_the_last() -> None:
    assert (gaps_of(*[0.0] * FEWEST).p99_s or 0.0) <= 1.2e-4
    assert 30.0 < (gaps_of(*[1e6] * FEWEST).p99_s or 0.0) < 60.0


def test_what_was_usual_fades_with_new_tokens() -> None:
    gaps = gaps_of(*[1.0] * 500)
    for _ in range(20 * MOST):
        gaps.record(0.01)
    assert gaps.p99_s is not None and gaps.p99_s < 0.02
    assert "gaps>" in repr(gaps)

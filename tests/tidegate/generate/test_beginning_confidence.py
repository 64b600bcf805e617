"""How sure a beginning is, by its tokens' probabilities."""

from __future__ import annotations

from math import inf, log, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.generate.beginning_confidence import beginning_confidence


def test_the_mean_is_geometric_and_the_least_is_the_least() -> None:
    logprobs = [log(0.9), log(0.4)]
    assert beginning_confidence(logprobs, "mean") == pytest.approx((0.9 * 0.4) ** 0.5)
    assert beginning_confidence(logprobs, "least") == pytest.approx(0.4)


@pytest.mark.parametrize("strange", [[], [log(0.9), nan], [-inf], [inf]])
def test_what_is_no_probability_is_as_unsure_as_can_be(strange: list[float]) -> None:
    assert beginning_confidence(strange, "mean") == beginning_confidence(strange, "least") == 0.0


@given(st.lists(st.floats(-50.0, 0.001), min_size=1, max_size=64))
def test_it_is_a_share_and_no_mean_is_below_the_least(logprobs: list[float]) -> None:
    least, mean = beginning_confidence(logprobs, "least"), beginning_confidence(logprobs, "mean")
    assert 0.0 <= least <= mean + 1e-12 <= 1.0 + 1e-9

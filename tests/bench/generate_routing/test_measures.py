"""What counts as kept, and what is in time."""

from __future__ import annotations

import pytest

from tests.bench.generate_routing.measures import Outcome, in_time, kept
from tests.bench.generate_routing.schedule import Asked, Heard

ASKED = Asked(1, 2.0, "talk", (3, 4), 4, 64, ttft_s=0.5, tpot_s=0.1, budget_s=8.0)


@pytest.mark.parametrize(("tokens_at", "whole", "is_kept", "came_in_time"), [
    ([0.4, 0.5, 0.6, 0.7], True, True, 4),
    ([0.6, 0.61, 0.62, 0.63], True, False, 2),  # the first two are
    ([0.1, 0.2, 0.3, 0.6], True, False, 4),  # too slow on average, and each by its own instant
    ([0.1, 0.39, 0.39, 0.39], True, True, 4),  # a pause that the average holds
    ([0.4, 0.5], False, False, 2),  # cut
    ([], True, False, 0),
])  # fmt: skip
def test_goodput_is_of_whole_answers_and_smooth_goodput_of_tokens(
    tokens_at: list[float], whole: bool, is_kept: bool, came_in_time: int
) -> None:
    heard = Heard(1, tokens_at, whole=whole)
    assert kept(ASKED, heard) == is_kept
    assert in_time(ASKED, heard) == came_in_time


def test_an_outcome_is_of_what_was_asked_in_the_time_that_counts() -> None:
    early, late = Asked(**{**vars(ASKED), "at": 0.5}), Asked(**{**vars(ASKED), "at": 6.5})
    heard = [Heard(1, [0.1] * 4, whole=True, served_by="pool/pool"), *[Heard(1, [0.1] * 3, whole=True)] * 2]
    found = Outcome.of("p90", [ASKED, early, late], heard, from_s=2.0, to_s=6.0, busy=0.5, late_p99_s=0.0)
    assert (found.requests, found.kept, found.goodput, found.wrong, found.pool_share) == (1, 1.0, 0.25, 0, 1.0)

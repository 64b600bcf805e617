"""What attention caches may take where nobody says, and where somebody does."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from tests.support.models.generative import COST, TALKER, talker
from tidegate.engines.generation.limits import cache_limit_bytes, engine_cache_bytes


@pytest.mark.parametrize(
    ("context", "slots", "cache_bytes", "configured", "limit"),
    [
        (512, 4, 1024, None, 4 * 512 * 1024),  # all slots, whole contexts
        (8192, 4, 1000, None, 8192 * 1000),  # 2048 tokens in each of four slots, and one whole context
        (8192, 64, 1000, None, 64 * 2048 * 1000),
        (100_000, 4, 1000, None, 100_000 * 1000),
        (8192, 4, 1000, 5000, 5000),
        (8192, 4, 0, None, inf),
    ],
)
def test_each_slot_has_room_and_one_answer_may_have_the_whole_context(
    context: int, slots: int, cache_bytes: int, configured: int | None, limit: float
) -> None:
    variant = replace(TALKER.variants[0], generation=replace(COST, slots=slots, cache_bytes=cache_bytes))
    assert cache_limit_bytes(talker(context=context), variant, configured) == limit


def test_a_model_that_does_not_generate_has_no_limit() -> None:
    assert cache_limit_bytes(replace(TALKER, generative=None), TALKER.variants[0], None) == inf


@pytest.mark.parametrize(
    ("cache_bytes", "configured", "given"),
    [
        (1000, None, (8192 + 96) * 1000),  # beside what the queue counts with, pages that no token is in
        (1000, 5000, 5000),
        (0, None, 0),  # as it likes
        (0, 5000, 5000),
    ],
)
def test_an_engine_is_given_room_for_what_its_host_counts_with(
    cache_bytes: int, configured: int | None, given: int
) -> None:
    variant = replace(TALKER.variants[0], generation=replace(COST, slots=4, cache_bytes=cache_bytes))
    assert engine_cache_bytes(talker(context=8192), variant, configured) == given

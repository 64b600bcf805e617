"""What attention caches may take where nobody says, and where somebody does."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from tests.support.models.generative import COST, TALKER, talker
from tidegate.engines.generation.limits import cache_limit_bytes


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

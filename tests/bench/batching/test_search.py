"""The search for the highest rate, against edges that are known."""

from __future__ import annotations

import pytest

from tests.bench.batching.search import LOWEST, RUNGS, STEP, highest, rate_of


@pytest.mark.parametrize("edge", [LOWEST, 21.0, 99.0, 100.0, 333.0, rate_of(RUNGS - 1)])
@pytest.mark.parametrize("start", [LOWEST, 20.0, 100.0, 400.0])
async def test_the_highest_rate_that_is_held_is_found_from_any_start(edge: float, start: float) -> None:
    async def holds(rate: float) -> bool:
        return rate <= edge

    found = await highest(holds, start)

    assert found <= edge < found * STEP or found == rate_of(RUNGS - 1)


async def test_who_holds_no_rate_at_all_is_given_0() -> None:
    async def holds(rate: float) -> bool:
        return False

    assert await highest(holds, 50.0) == 0.0


async def test_a_good_first_guess_takes_few_tries() -> None:
    tried = []

    async def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= 100.0

    await highest(holds, 95.0)

    assert len(tried) <= 5

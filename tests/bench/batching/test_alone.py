"""The references without a server: their groups, against all there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from tests.bench.batching.alone import cheapest_runs

COST_S = [12.0 + tokens for tokens in range(2000)]


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize("lengths", [[7], [4, 4, 4, 90], [4, 9, 16, 25, 36, 49], [5] * 9])
def test_no_other_cut_into_runs_costs_less(lengths: list[int], most: int) -> None:
    def cost_of(runs: list[tuple[int, int]]) -> float:
        return sum(COST_S[(end - start) * lengths[end - 1]] for start, end in runs)

    count = len(lengths)
    cuts = [cut for inside in range(count) for cut in combinations(range(1, count), inside)]
    every = [list(pairwise((0, *cut, count))) for cut in cuts]
    allowed = [runs for runs in every if all(end - start <= most for start, end in runs)]

    found = cheapest_runs(lengths, COST_S, most)

    assert cost_of(found) == min(map(cost_of, allowed))
    assert sorted(found) in allowed

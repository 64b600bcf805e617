"""Latency targets of a model, where the configuration names none: how long may its answers and batches take?

A fixed number of seconds suits one model of a pool and no other. Each model says for itself how long a caller waits by
default (`default_budget_s`), and was measured at warm-up:

    answer   99 of 100 within BUDGET_SHARE of the default budget, from arrival to answer: the rest is for the ways, and
             for a second attempt elsewhere. A pool drops what is past its deadline, so that a target of the whole
             budget would never be missed.
    batch    99 of 100 within the same, and within TABLE_RATIO times what warm-up measured for as much work

No target is less than TABLE_RATIO times the least batch measured: neither a smaller batch nor a fresh worker would
reach it.

Pure. It can be wrong where callers bring budgets far from the default: `control.latency_target_s` and
`recycling.p99_limit_s` name seconds for all models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

BUDGET_SHARE: Final = 0.5
TABLE_RATIO: Final = 3.0  # what a busy machine does to a healthy worker's tail is less


def answer_target_s(default_budget_s: float, cost: Sequence[tuple[float, float]]) -> float:
    """Seconds that 99 of 100 answers should keep in the pool.

    Args: cost: measured (work units, seconds) points, the least work first.
    """
    return max(BUDGET_SHARE * default_budget_s, TABLE_RATIO * cost[0][1])


def batch_limit_s(target_s: float, table_s: float) -> float:
    """Seconds that 99 of 100 batches of so much work keep where the worker is well."""
    return max(target_s, TABLE_RATIO * table_s)

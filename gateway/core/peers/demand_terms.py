"""Demand terms are the parts of a gateway's need for pool replicas, so that the needs of several can become one.

    needed = ⌈ Σ forecast + √ Σ variance + max backlog ⌉

Loads of gateways add up, and so do the variances of independent arrivals, of which one margin is taken. Each gateway
sees the whole backlog of the pools that it shares with others, so it counts once.
Source: docs/design/routing.md, "Several gateways".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple


class DemandTerms(NamedTuple):
    """The need before it is rounded, in replicas; the variance in replicas squared."""

    forecast: float
    variance: float
    backlog: float

    @property
    def replicas(self) -> float:
        """The need of these terms alone."""
        return self.forecast + sqrt(self.variance) + self.backlog


def pooled(terms: Sequence[DemandTerms]) -> DemandTerms:
    """The terms of all of these gateways together; at least one."""
    return DemandTerms(
        sum(one.forecast for one in terms),
        sum(one.variance for one in terms),
        max(one.backlog for one in terms),
    )

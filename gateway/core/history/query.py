"""A query selects remembered requests by outcome, model, target and tenant, newest or slowest first.

All that is asked for must hold. Newest first, but with `slowest` slowest first.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from itertools import islice
from math import inf
from typing import NamedTuple

from gateway.core.history.recorder import RequestRecord
from tidegate.caller import tenant_of


class RecordFilter(NamedTuple):
    late: bool = False  # late, or without any answer, but not cancelled
    failed: bool = False  # no answer at all
    hedged: bool = False
    model: str = ""
    target: str = ""  # one of those that were tried
    tenant: str = ""
    slowest: bool = False
    before: float = inf  # an instant of the machine's clock: ended at or before it

    def fits(self, one: RequestRecord) -> bool:
        return (
            (not self.late or one.missed)
            and (not self.failed or one.answer is None)
            and (not self.hedged or one.hedged)
            and (not self.model or one.model == self.model)
            and (not self.tenant or self.tenant in (one.tenant, tenant_of(one.tenant)))
            and one.arrived_at + one.elapsed_s <= self.before
            and (not self.target or self.target in one.tried())
        )


def select_records(
    newest_first: Iterable[RequestRecord], sought: RecordFilter, most: int, skip: int = 0
) -> list[RequestRecord]:
    """Args: skip: so many of the first that fit are left out: they were in the answers before."""
    fitting = (one for one in newest_first if sought.fits(one))
    if sought.slowest:
        return nlargest(skip + most, fitting, key=lambda one: one.elapsed_s)[skip:]
    return list(islice(fitting, skip, skip + most))

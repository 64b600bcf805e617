"""Isolation splits the members of a failed batch into smaller batches, so that only the bad request fails.

    the engine raised     in two halves, and a half that raises in halves again: a bad one among b is alone after
                          log2(b) more calls, and half of its batch-mates are answered after one
    the worker went down  each by itself, and once: it costs a worker to find out, so there is no second search
    no memory was there   in two halves, which need half as much; a request alone is tried once more, because others
                          may have taken the memory

Trying each by itself would need b calls after an error, and a batch of 32 would take its worker for as long as 32
requests alone. Where every member is bad, halves cost 2·b calls, twice as much; a device on which everything fails is
the breaker's concern.

A group is tried by itself (`QueueItem.cohort`); otherwise its search would draw in other waiting requests.

Source: docs/design/faults.md, "Batch isolation"; bisection as in `git bisect`, group testing after Dorfman (1943).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from tidegate.outcome import InternalError, Poisonous, ServeError

Member = TypeVar("Member")

MAX_DEATHS: Final = 2  # workers that died while they computed a request, its fault or not, before it is given up
MAX_STARVED: Final = 2  # times that there was no memory for a request alone before it is given up


def retry_groups(members: Sequence[Member], *, worker_died: bool, starved: bool = False) -> list[Sequence[Member]]:
    """Groups in which to retry `members`; none for a member that failed by itself."""
    if worker_died:
        return [[member] for member in members]
    if len(members) < 2:
        return [members] if starved else []
    middle = (len(members) + 1) // 2
    return [members[:middle], members[middle:]]


def final_error(error: ServeError, deaths: Sequence[int]) -> ServeError:
    """The error for members that are given up after `error`; it blames the request where that was by itself.

    Args:
        deaths: for each member of the batch, workers that died while they computed it. One death proves no fault.
    """
    if len(deaths) == 1 and (type(error) is InternalError or deaths[0] >= MAX_DEATHS):
        return Poisonous(error.message)
    return error

"""Isolation: a batch failed; in which smaller batches are its members tried again, so that only the bad one fails?

    the engine raised     in two halves, and a half that raises in halves again: a bad one among b is alone after
                          log2(b) more calls, and half of its mates have their answers after one
    the worker went down  each by itself, and once: it costs a worker to find out, so there is no second search
    no memory was there   in two halves, which need half as much; who is alone is tried once more, for others may have
                          taken the memory

Trying each by itself would need b calls after an error, and a batch of 32 would take its worker for as long as 32
requests alone. Where every member is bad, halves cost 2·b calls, twice as much; a device on which everything fails is
the breaker's business, not this one's.

A group keeps to itself when it is tried (`QueueItem.cohort`), or its search would draw in whoever waits.

Source: docs/design/faults.md, "Batch isolation"; bisection as in `git bisect`, group testing after Dorfman (1943).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from tidegate.outcome import InternalError, Poisonous, ServeError

Member = TypeVar("Member")

MAX_DEATHS: Final = 2  # workers that went down under a request, its fault or not, before it is given up
MAX_STARVED: Final = 2  # times that there was no memory for a request alone before it is given up


def retry_groups(members: Sequence[Member], *, worker_died: bool, starved: bool = False) -> list[Sequence[Member]]:
    """Groups in which to try `members` again; none for a member that raised by itself."""
    if worker_died:
        return [[member] for member in members]
    if len(members) < 2:
        return [members] if starved else []
    middle = (len(members) + 1) // 2
    return [members[:middle], members[middle:]]


def final_error(error: ServeError, deaths: Sequence[int]) -> ServeError:
    """What those are told that are given up after `error`: that it was them, where one was by itself.

    Args:
        deaths: for each member of the batch, workers that went down under it. One may be anybody's fault.
    """
    if len(deaths) == 1 and (type(error) is InternalError or deaths[0] >= MAX_DEATHS):
        return Poisonous(error.message)
    return error

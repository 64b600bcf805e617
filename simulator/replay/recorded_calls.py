"""Computations of a recording: single ones, and batches put together again from their members.

A pool answers each member of a batch with the time of the whole, and what was computed is as many rows, all padded to
the longest. So those answers belong together that took the same to the microsecond and came at the same moment; where
their rows are as many as the batch had, it is known what it was. Where one is missing (its caller had gone, or the
recording ended) the batch is left out, since the longest may be the one that is missing.

Invariants: no answer is in two calls; every call is of one model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from cloud_pool.core.batching.grouping import WorkShape, padded_shape
from gateway.core.history.trace_format import RecordedAttempt, RecordedRequest

_TOGETHER_S: Final = 0.5  # answers of one batch come within this; one that took as long by chance is seldom so near


class RecordedCall(NamedTuple):
    """One computation: when (of its first request's arrival), of which model and version, and how much work."""

    at_s: float
    model: str
    version: str
    units: float
    took_s: float


def calls_of(attempts: Sequence[tuple[RecordedRequest, RecordedAttempt]]) -> list[RecordedCall]:
    """The computations at one target of which it is known what was computed, by their instants."""
    known = [(request, attempt) for request, attempt in attempts if attempt.compute_s and request.units]
    lone = [_call([one]) for one in known if one[1].batch <= one[0].rows]
    whole = [_call(one) for one in _batches([one for one in known if one[1].batch > one[0].rows])]
    return sorted([*lone, *whole])


def shape_of(request: RecordedRequest) -> WorkShape:
    """As a scenario has it: whole rows of one whole length."""
    rows = max(1, request.rows)
    length = max(1, round((request.units or 1.0) / rows))
    return WorkShape(rows, length, float(rows * length))


def _batches(
    answers: list[tuple[RecordedRequest, RecordedAttempt]],
) -> Iterator[list[tuple[RecordedRequest, RecordedAttempt]]]:
    for _, alike in groupby(sorted(answers, key=_likeness), key=lambda one: _likeness(one)[:-1]):
        members: list[tuple[RecordedRequest, RecordedAttempt]] = []
        for one in alike:
            if members and _ended_s(one) - _ended_s(members[-1]) > _TOGETHER_S:
                members = []
            members.append(one)
            if sum(request.rows for request, _ in members) == one[1].batch:
                yield members
                members = []


def _likeness(one: tuple[RecordedRequest, RecordedAttempt]) -> tuple[str, str, float, int, float]:
    request, attempt = one
    return request.model, request.version, attempt.compute_s or 0.0, attempt.batch, _ended_s(one)


def _ended_s(one: tuple[RecordedRequest, RecordedAttempt]) -> float:
    request, attempt = one
    return request.at_s + attempt.at_s + attempt.took_s


def _call(members: Sequence[tuple[RecordedRequest, RecordedAttempt]]) -> RecordedCall:
    first, attempt = members[0]
    at_s = min(request.at_s for request, _ in members)
    units = padded_shape([shape_of(request) for request, _ in members]).units
    return RecordedCall(at_s, first.model, first.version, units, attempt.compute_s or 0.0)

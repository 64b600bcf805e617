"""What is remembered is packed a moment later, and readers miss nothing all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gateway.core.history.recorder import MAX_PACKED_BYTES, FlightRecorder, RequestRecord
from gateway.core.placement.placer import Placer
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tests.support.gateway.flowns import request_record

DECISION = Placer(fleet_of(edge_a=variant())).decide(ask(), NOW)


class Deferred:
    """Keeps what is to be done later."""

    def __init__(self) -> None:
        self.kept: list[Callable[[], None]] = []

    def __call__(self, do: Callable[[], None]) -> None:
        self.kept.append(do)

    def come(self) -> None:
        kept, self.kept = self.kept, []
        for do in kept:
            do()


def bare(number: int) -> RequestRecord:
    return replace(request_record(number=number), decision=None)


def test_decisions_are_packed_later_and_whoever_reads_finds_them_packed() -> None:
    deferred, heard, kept = Deferred(), list[RequestRecord](), list[RequestRecord]()
    memory = FlightRecorder(1000, defer=deferred)
    memory.watchers.append(heard.append)
    memory.taps.append(kept.append)
    memory.add(bare(1), DECISION)
    memory.add(bare(2), DECISION)
    assert [one.number for one in heard] == [1, 2] and kept == []
    assert [one.number for one in memory] == [1, 2]
    assert all(one.decision is not None and one.decision.choice is not None for one in memory)
    deferred.come()
    assert len(memory) == len(kept) == 2, "not twice"
    assert memory.held_bytes > 0


def test_numbers_rise_also_where_one_needs_no_packing() -> None:
    memory = FlightRecorder(1000, defer=Deferred())
    memory.add(bare(1), DECISION)
    memory.add(request_record(number=2))
    assert [one.number for one in memory] == [1, 2]


@pytest.mark.slow
def test_decisions_that_are_held_as_they_are_are_few() -> None:
    kept = list[RequestRecord]()
    memory = FlightRecorder(1000, defer=Deferred())
    memory.taps.append(kept.append)
    for number in range(3 * MAX_PACKED_BYTES):
        memory.add(bare(number), DECISION)
    assert len(kept) == 3 * MAX_PACKED_BYTES

"""Observers that are told a moment later, and readers that miss nothing all the same."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from gateway.core.flown import MOST_RAW, Flown, Memory
from gateway.core.placement import Placer
from gateway.layers.later import MOST, Later
from tests.support.fleets import NOW, ask, fleet_of, variant
from tests.support.flowns import flown
from tidegate.outcome import Overloaded
from tidegate.types import Call, InferRequest, InferResponse, Reply

CALL = Call(InferRequest("minilm", ()), "oip-http", NOW)
REPLY = Reply(InferResponse("minilm", "1", ()))
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


class Seen:
    def __init__(self) -> None:
        self.told: list[object] = []

    def began(self, call: Call) -> None:
        self.told.append("began")

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        self.told.append(("answered", now))

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        self.told.append((type(error).__name__, now))


def test_ends_are_told_together_in_their_order_with_the_instants_at_which_they_were() -> None:
    seen, deferred = Seen(), Deferred()
    later = Later([seen], deferred)
    later.began(CALL)
    later.answered(CALL, REPLY, NOW + 1.0)
    later.ended(CALL, Overloaded("full"), NOW + 2.0)
    assert seen.told == ["began"], "what is inside is known at once"
    assert len(deferred.kept) == 1, "one timer for them all"
    deferred.come()
    assert seen.told[1:] == [("answered", NOW + 1.0), ("Overloaded", NOW + 2.0)]
    later.answered(CALL, REPLY, NOW + 3.0)
    assert len(deferred.kept) == 1, "and one for those that come then"


def test_who_reads_has_them_told_first_and_nothing_is_told_twice() -> None:
    seen, deferred = Seen(), Deferred()
    later = Later([seen], deferred)
    later.answered(CALL, REPLY, NOW)
    later.settle()
    assert len(seen.told) == 1
    deferred.come()
    later.settle()
    assert len(seen.told) == 1


def test_no_more_than_so_many_replies_live_longer_for_it() -> None:
    seen, deferred = Seen(), Deferred()
    later = Later([seen], deferred)
    for number in range(10 * MOST):
        later.answered(CALL, REPLY, NOW + number)
    assert len(seen.told) == 10 * MOST
    assert "0 ends" in repr(later)


def bare(number: int) -> Flown:
    return replace(flown(number=number), decision=None)


def test_decisions_are_packed_later_and_whoever_reads_finds_them_packed() -> None:
    deferred, heard, kept = Deferred(), list[Flown](), list[Flown]()
    memory = Memory(1000, defer=deferred)
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
    memory = Memory(1000, defer=Deferred())
    memory.add(bare(1), DECISION)
    memory.add(flown(number=2))
    assert [one.number for one in memory] == [1, 2]


def test_decisions_that_are_held_as_they_are_are_few() -> None:
    kept = list[Flown]()
    memory = Memory(1000, defer=Deferred())
    memory.taps.append(kept.append)
    for number in range(3 * MOST_RAW):
        memory.add(bare(number), DECISION)
    assert len(kept) == 3 * MOST_RAW

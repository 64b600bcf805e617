"""A target is believed to do as much at a time as it has shown, whatever it claims."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.fleet.concurrency_credit import FIRST, ConcurrencyCredit
from gateway.core.fleet.link_events import LinkDown
from tests.support.gateway.fleets import NOW, fleet_of, variant
from tidegate.fleet.offers import MOST_SLOTS


def test_a_claim_is_believed_as_far_as_it_was_shown_and_doubles_from_there() -> None:
    told: list[int] = []
    credit = ConcurrencyCredit(told.append)
    credit.claim(256)
    assert credit.believed == FIRST
    for at_once in (20, 32, 64, 64, 128):
        credit.answered(at_once)
    assert told == [32, 40, 64, 128, 256]
    credit.claim(4)
    assert credit.believed == 4


def test_what_begins_and_never_ends_well_shows_nothing() -> None:
    credit = ConcurrencyCredit()
    credit.claim(MOST_SLOTS)
    for _ in range(1000):
        credit.begun()
    for _ in range(900):
        credit.left(well=False)
    assert credit.believed == FIRST
    credit.left(well=True)
    assert credit.believed == 200


def test_one_device_that_claims_65536_slots_does_not_lift_the_limit_of_all() -> None:
    fleet = fleet_of(edge_a=replace(variant("int4"), slots=MOST_SLOTS), edge_b=replace(variant("int4"), slots=4))
    limit = AdaptiveLimit(4096, start=128, targets=lambda: fleet.queues, slots=lambda: fleet.slots)
    assert fleet.slots == FIRST + 4
    assert [limit.try_acquire() for _ in range(4096)].count(True) == 128
    liar = fleet.targets["edge/a"].concurrency
    for _ in range(128):
        liar.begun()
    liar.left(well=True)
    assert fleet.slots == 2 * 128 + 4
    assert [limit.try_acquire() for _ in range(4096)].count(True) == fleet.slots - 128
    fleet.remove("edge/a")
    liar.left(well=True)  # one that was still under way
    assert fleet.slots == 4
    fleet.fold(LinkDown("edge/b", "reset"), NOW)
    assert fleet.slots == 0

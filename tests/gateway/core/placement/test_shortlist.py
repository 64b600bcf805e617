"""The shortlist: a decision over ten thousand targets looks at few, and at the right ones."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkUp
from gateway.core.placement.placer import Placer
from gateway.core.placement.shortlist import LOOK_AT_ALL, MOST, POOLS, SAMPLE, Rotation, Shortlist
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, spec, variant


def large(edges: int, pools: int = 2, slow: float = 0.010) -> Fleet:
    """Edges of which each is a little slower than the one before it."""
    names = {f"edge_{n}": variant("int8", compute_s=slow * (1.0 + n / 100)) for n in range(edges)}
    return fleet_of(**names, **{f"pool_{n}": variant(compute_s=0.030) for n in range(pools)})


def listed(shortlist: Shortlist, fleet: Fleet) -> list[str]:
    return [one.target.id for one in shortlist.of("minilm", "1", fleet.offers("minilm", "1"), 16.0)]


def test_a_small_fleet_is_looked_at_whole() -> None:
    fleet = large(LOOK_AT_ALL - 2)
    assert listed(Shortlist(), fleet) == list(fleet.targets)
    assert Shortlist().of("nobody", "1", fleet.offers("nobody", "1"), 16.0) == []


def test_of_a_large_one_every_pool_is_seen_and_never_more_than_the_most() -> None:
    fleet, shortlist = large(200), Shortlist()
    for _ in range(50):
        seen = listed(shortlist, fleet)
        assert len(seen) == len(set(seen)) <= MOST
        assert {"pool/0", "pool/1"} <= set(seen)


def test_many_pools_take_turns() -> None:
    fleet, shortlist = large(40, pools=3 * POOLS), Shortlist()
    rounds = [{one for one in listed(shortlist, fleet) if one.startswith("pool/")} for _ in range(3)]
    assert set.union(*rounds) == {f"pool/{n}" for n in range(3 * POOLS)}


def test_every_edges_turn_comes_within_one_rotation() -> None:
    fleet, shortlist = large(198), Shortlist()
    seen: set[str] = set()
    for _ in range(-(-200 // SAMPLE)):
        seen.update(listed(shortlist, fleet))
    assert seen == set(fleet.targets)


def test_the_fastest_idle_ones_are_always_seen_once_they_are_known() -> None:
    fleet, shortlist = large(300), Shortlist()
    for _ in range(30):
        listed(shortlist, fleet)
    assert {"edge/0", "edge/1"} <= set(listed(shortlist, fleet))

    # when the fastest are busy, the next fastest class that is idle is seen instead
    for number in range(20):
        fleet.targets[f"edge/{number}"].queue_estimate.launch(number, 0.010, NOW)
    for _ in range(30):
        seen = listed(shortlist, fleet)
    idle = [int(one.partition("/")[2]) for one in seen if one.startswith("edge/")]
    assert sum(20 <= number < 60 for number in idle) >= 6


def test_who_is_gone_is_not_seen_and_who_is_back_is() -> None:
    fleet, shortlist = large(100), Shortlist()
    for _ in range(20):
        listed(shortlist, fleet)
    for number in range(50):
        fleet.fold(LinkDown(f"edge/{number}", "gone"), NOW)
    for _ in range(20):
        assert not set(listed(shortlist, fleet)) & {f"edge/{number}" for number in range(50)}
    fleet.fold(LinkUp("edge/0", "edge/0", 2, (offer(variant("int8", compute_s=0.010)),)), NOW)
    seen = [one for _ in range(20) for one in listed(shortlist, fleet)]
    assert "edge/0" in seen


@pytest.mark.slow
def test_memory_is_bounded_by_the_fleet_however_many_come_and_go() -> None:
    fleet, shortlist = large(40), Shortlist()
    for number in range(1000):
        fleet.add(spec(f"edge/new{number}"), NOW)
        fleet.fold(LinkUp(f"edge/new{number}", f"edge/new{number}", 1, (offer(variant("int8")),)), NOW)
        listed(shortlist, fleet)
        fleet.remove(f"edge/new{number}")
    (idle,) = re.findall(r"(\d+) idle", repr(shortlist))
    assert int(idle) <= 2 * 43


def test_a_request_that_only_one_in_a_thousand_takes_finds_it() -> None:
    fleet = large(500)
    fleet.add(spec("edge/rare"), NOW)
    fleet.fold(LinkUp("edge/rare", "edge/rare", 1, (offer(variant("bf16")),)), NOW)
    decision = Placer(fleet).decide(ask(variant="bf16"), NOW)
    assert decision.chosen is not None and decision.chosen.target.id == "edge/rare"


def test_a_refusal_names_some_and_counts_the_others() -> None:
    decision = Placer(large(500)).decide(ask(variant="bf16"), NOW)
    assert decision.refusal is not None
    assert "edge/0 has int8" in decision.refusal.message
    assert decision.refusal.message.endswith("and 486 more")


@pytest.mark.slow
def test_what_it_chooses_is_nearly_as_good_as_the_best_of_all() -> None:
    """With a tenth of a thousand edges busy, the finish of the chosen one is within a class of the best."""
    fleet, draw = large(1000, slow=0.010), Random(3)
    for number in range(100):
        fleet.targets[f"edge/{number}"].queue_estimate.launch(number, 0.050, NOW)
    placer, losses = Placer(fleet), []
    best_s = 0.002 + 0.010 * 2.0  # of edge/100, idle
    for number in range(400):
        decision = placer.decide(ask(units=8.0 + draw.random()), NOW)
        assert decision.chosen is not None
        if number >= 100:
            losses.append(decision.chosen.finish_s / best_s - 1.0)
    assert max(losses) < 0.25


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), max_size=30))
def test_a_rotation_visits_everybody_once_a_round_whatever_the_size(steps: list[tuple[int, int]]) -> None:
    rotation = Rotation()
    for count, size in steps:
        places = rotation.next(count, size)
        assert len(places) == min(count, size)
        assert len(set(places)) == len(places)
        assert all(0 <= place < size for place in places)
    assert sorted(rotation.next(7, 7)) == list(range(7))
    assert rotation.next(5, 0) == []
    assert repr(rotation).startswith("<Rotation at")


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["up", "down", "busy", "idle", "look"])), max_size=120))
def test_it_lists_only_offers_that_stand_and_each_once(steps: list[tuple[int, str]]) -> None:
    fleet, shortlist = large(50), Shortlist()
    for number, what in steps:
        target = fleet.targets.get(f"edge/{number}")
        if target is None:
            continue
        if what == "up":
            fleet.fold(LinkUp(target.id, target.id, target.epoch + 1, (offer(variant("int8")),)), NOW)
        elif what == "down":
            fleet.fold(LinkDown(target.id, "gone"), NOW)
        elif what == "busy":
            target.queue_estimate.launch(target.queue_estimate.in_flight, 0.01, NOW)
        elif what == "idle" and target.queue_estimate.in_flight:
            target.queue_estimate.finish(target.queue_estimate.in_flight - 1, NOW)
        offers = fleet.offers("minilm", "1")
        seen = shortlist.of("minilm", "1", offers, 16.0)
        assert all(offers.all.get((one.target.id, one.variant.name)) is one for one in seen)
        assert len({id(one) for one in seen}) == len(seen)
        assert len(offers.all) <= LOOK_AT_ALL or len(seen) <= MOST

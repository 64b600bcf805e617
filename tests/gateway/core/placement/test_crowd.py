"""Where many gateways share the targets, a decision looks at a few, and at all where these would be late."""

from __future__ import annotations

from collections import Counter
from random import Random

from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.crowd import OF_EACH, sample
from gateway.core.placement.placer import Decision, Placer
from gateway.core.placement.utility import UtilityPlacer
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant


def fleet(edges: int, pools: int, *, fast: str = "") -> Fleet:
    cost = lambda name: 0.010 if name == fast else 0.100  # noqa: E731
    names = [f"edge_{number}" for number in range(edges)] + [f"pool_{number}" for number in range(pools)]
    return fleet_of(**{name: variant(compute_s=cost(name)) for name in names})


def seen(of: Fleet, seed: int = 1) -> list[str]:
    return [one.target.id for one in sample(of.offers("minilm", "1"), Random(seed).random)]


def chosen(decision: Decision) -> str:
    assert decision.chosen is not None
    return decision.chosen.target.id


def test_a_few_of_each_tier_are_looked_at_none_twice_and_each_as_often_as_the_others() -> None:
    many = fleet(20, 20)
    counts: Counter[str] = Counter()
    for seed in range(2000):
        looked_at = seen(many, seed)
        assert len(looked_at) == len(set(looked_at)) <= 2 * OF_EACH
        assert sum(one.startswith("pool/") for one in looked_at) == OF_EACH
        counts.update(one for one in looked_at if one.startswith("pool/"))
    assert min(counts.values()) > 0.7 * max(counts.values())


def test_of_few_all_are_looked_at() -> None:
    assert sorted(seen(fleet(3, 2))) == ["edge/0", "edge/1", "edge/2", "pool/0", "pool/1"]
    assert sorted(seen(fleet(0, 2))) == ["pool/0", "pool/1"]
    assert set(seen(fleet(20, 1))) >= {"pool/0"}


def test_gateways_alone_all_choose_the_same_target_and_many_do_not() -> None:
    of = fleet(0, 20)
    assert {chosen(UtilityPlacer(of).decide(ask(), NOW)) for _ in range(10)} == {"pool/0"}
    crowd = set()
    for seed in range(10):
        placer = UtilityPlacer(of)
        placer.share_targets(Random(seed).random)
        crowd.add(chosen(placer.decide(ask(), NOW)))
    assert len(crowd) > 3


def test_where_none_of_the_few_would_be_in_time_all_are_looked_at() -> None:
    of = fleet(0, 20, fast="pool_13")
    for kind in (Placer, UtilityPlacer):
        for seed in range(20):
            placer = kind(of)
            placer.share_targets(Random(seed).random)
            assert chosen(placer.decide(ask(budget_s=0.060), NOW)) == "pool/13"


def test_targets_that_were_tried_are_left_out() -> None:
    of = fleet(0, 20)
    placer = UtilityPlacer(of)
    placer.share_targets(Random(1).random)
    tried = {f"pool/{number}" for number in range(19)}
    assert chosen(placer.decide(ask(), NOW, tried)) == "pool/19"

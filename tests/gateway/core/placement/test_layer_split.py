"""The choice between a whole model and its cuts, by links, queues, pins and demands."""

from __future__ import annotations

from typing import Final

import pytest

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkLoad, LinkUp
from gateway.core.placement.ask import Ask
from gateway.core.placement.layer_split import (
    CutTerms,
    SplitDecision,
    choose_split,
    head_ask,
    head_deadline,
    insure_at,
    is_allowed,
    tail_ask,
)
from gateway.core.placement.utility import UtilityPlacer
from tests.support.gateway.fleets import NOW, spec, variant
from tidegate.fleet.offers import ModelOffer
from tidegate.placement_pin import Pin
from tidegate.types import LoadReport

IMAGE: Final = 600_000  # bytes
EARLY = CutTerms("early", "whole.head-1", "whole.tail-1", 1.0, 100_000, keeps_input=True)
LATE = CutTerms("late", "whole.head-2", "whole.tail-2", 1.0, 12_000, keeps_input=True)
_EDGE_MS: Final = {"whole": 400.0, EARLY.head: 30.0, LATE.head: 120.0}
_POOL_MS: Final = {"whole": 20.0, EARLY.tail: 15.0, LATE.tail: 8.0}


def fleet(*, mbit_s: float, edge_times: float = 1.0, pools: int = 1) -> Fleet:
    """One edge on a good network and pools behind a link of this bandwidth."""
    made = Fleet(lambda _model, _version: "items")
    ends = [("edge/a", _EDGE_MS, edge_times), *((f"pool/{number}", _POOL_MS, 1.0) for number in range(pools))]
    for id, ms, times in ends:
        offers = tuple(
            ModelOffer(name, "1", (variant("fp32", compute_s=one * times / 1e3, quality=1.0),), "ready")
            for name, one in ms.items()
        )
        made.add(spec(id), NOW)
        made.fold(LinkUp(id, id, 1, offers), NOW)
        link = made.targets[id].link
        for number in range(20):
            link.record(0.002 if id == "edge/a" else 0.020, NOW + number * 0.01)
        link.s_per_byte = 8.0 / (1e9 if id == "edge/a" else mbit_s * 1e6)
    return made


def ask(*, budget_s: float = 0.3, pin: Pin = "any", variant: str = "") -> Ask:
    return Ask("whole", "1", 1.0, 1, 1, NOW + 1.0 + budget_s, variant=variant, body_bytes=IMAGE, pin=pin)


def decided(over: Fleet, asked: Ask) -> SplitDecision:
    return choose_split(UtilityPlacer(over), asked, (EARLY, LATE), NOW + 1.0)


@pytest.mark.parametrize(
    ("mbit_s", "budget_s", "layer"),
    [
        (0.3, 0.3, None),  # 12 kB take 320 ms: nothing is in time
        (1.0, 0.3, "late"),  # 96 ms of activations, and 800 of the earlier ones
        (5.0, 0.3, "late"),
        (20.0, 0.14, "early"),  # 40 ms of activations, less than the late head takes longer; the image takes 240
        (1000.0, 0.3, None),  # the whole is in the pool in 5 ms
    ],
)
def test_the_cut_moves_with_the_bandwidth_of_the_present_link(
    mbit_s: float, budget_s: float, layer: str | None
) -> None:
    found = decided(fleet(mbit_s=mbit_s), ask(budget_s=budget_s))
    assert (None if found.chosen is None else found.chosen.cut.layer) == layer
    if found.chosen is not None:
        assert found.whole is not None
        assert found.chosen.finish_s < found.whole.finish_s
        assert found.chosen.chance > 0.9


def test_what_is_expected_of_a_cut_is_both_ends_and_the_bytes_between_them() -> None:
    found = decided(fleet(mbit_s=5.0), ask())
    assert found.chosen is not None
    wire_s = LATE.between_bytes * 8 / 5e6 + (IMAGE + LATE.between_bytes) * 8 / 1e9
    assert found.chosen.finish_s == pytest.approx(0.120 + 0.008 + 0.002 + 0.020 + wire_s, abs=0.004)


def test_an_edge_that_makes_it_by_itself_is_left_alone() -> None:
    assert decided(fleet(mbit_s=5.0, edge_times=0.2), ask()).chosen is None


def test_a_queue_at_the_edge_makes_a_cut_the_better_one() -> None:
    busy = fleet(mbit_s=15.0, edge_times=0.5)
    assert decided(busy, ask()).chosen is None
    busy.fold(LinkLoad("edge/a", LoadReport(1, 1, 4, 1, 0.15)), NOW + 1.0)
    found = decided(busy, ask())
    assert found.chosen is not None
    assert found.chosen.head.wait_s == pytest.approx(0.15, abs=0.01)


@pytest.mark.parametrize(("pin", "may"), [("any", True), ("edge-input", True), ("site", False), ("edge", False)])
def test_a_pin_limits_where_the_tail_may_be(pin: Pin, may: bool) -> None:
    found = decided(fleet(mbit_s=5.0), ask(pin=pin))
    assert (found.chosen is not None) == may
    assert found.whole is not None
    assert found.whole.target.id == "edge/a" or pin == "any"


def test_a_pinned_input_stays_on_edges_where_a_tail_takes_more_of_it_than_masks() -> None:
    leaky = LATE._replace(keeps_input=False)
    assert is_allowed(leaky, ask())
    assert not is_allowed(leaky, ask(pin="edge-input"))
    assert head_ask(LATE, ask(pin="edge-input")).pin == "edge"
    assert tail_ask(LATE, ask(pin="edge-input")).pin == "any"
    assert tail_ask(LATE, ask(pin="site")).pin == "site"


def test_a_demanded_variant_is_not_cut() -> None:
    assert decided(fleet(mbit_s=5.0), ask(variant="fp32")).chosen is None


def test_the_head_is_due_when_the_tail_has_to_begin_and_never_before_it_can_be_done() -> None:
    now = NOW + 1.0
    asked = ask()
    option = decided(fleet(mbit_s=5.0), asked).chosen
    assert option is not None
    assert head_deadline(option, asked, now) == pytest.approx(asked.deadline - option.tail.finish_s)
    hurried = asked._replace(deadline=now + option.tail.finish_s)
    assert head_deadline(option, hurried, now) <= hurried.deadline


def test_a_silent_tail_is_insured_only_where_the_edge_can_still_make_it_after_the_tail_was_due() -> None:
    now = NOW + 1.0
    placer = UtilityPlacer(fleet(mbit_s=5.0))
    roomy = ask(budget_s=1.0)
    last = insure_at(placer, roomy, now + 0.2, now)
    assert last is not None
    assert 0.3 < roomy.deadline - now - 0.4 < 0.65
    assert last <= roomy.deadline - 0.4
    assert insure_at(placer, roomy, now + 0.9, now) is None  # the tail is due later than that
    assert insure_at(placer, ask(budget_s=0.3), now + 0.1, now) is None  # the edge is too slow


def test_more_pools_are_more_ends_for_the_same_activations() -> None:
    found = decided(fleet(mbit_s=5.0, pools=3), ask())
    assert found.chosen is not None
    assert found.chosen.tail.target.id.startswith("pool/")
    assert len(found.options) == 2


def test_a_silence_behind_a_large_body_is_no_sign_of_trouble_and_a_longer_one_is() -> None:
    over = fleet(mbit_s=5.0)
    link = over.targets["pool/0"].link
    link.sent(1, NOW, 100_000)
    link.accepted(1, NOW + 0.02 + 0.16)  # 5 Mbit/s, and the path acknowledges
    link.sent(2, NOW + 0.9, 100_000)
    busy = decided(over, ask())
    assert link.trust(NOW + 1.0) < 0.8
    assert busy.chosen is not None
    assert busy.chosen.chance > 0.9
    gone = choose_split(UtilityPlacer(over), ask()._replace(deadline=NOW + 2.3), (EARLY, LATE), NOW + 2.0)
    assert gone.chosen is None

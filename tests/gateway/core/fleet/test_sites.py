"""What a site tells of itself, and what an upstream gateway makes of it: summary, queue and offers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkUp
from gateway.core.fleet.site_queue import STALE_S, SiteQueueEstimate
from gateway.core.fleet.site_summary import MOST, SiteSummary, summarise
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.placer import Placer, added_work_s, estimate
from gateway.core.request.attempt import AttemptTelemetry
from gateway.serving.own_places import OwnPlaces
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, variant
from tidegate.fleet.offers import VariantOffer, decode_offers, encode_offers
from tidegate.types import LoadReport


def site_of(fleet: Fleet, name: str, *variants: VariantOffer, load: LoadReport | None = None) -> None:
    spec = TargetSpec(f"site/{name}", "site", "127.0.0.1:1")
    target = fleet.add(spec, NOW)
    fleet.fold(LinkUp(spec.id, spec.id, 1, (offer(*variants),)), NOW)
    if load is not None:
        target.queue_estimate.report(load, "link", NOW)


# the summary


def test_a_variant_has_the_cost_of_the_fastest_place_and_the_capacity_of_all() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.1), edge_b=variant(compute_s=0.2), edge_c=variant(compute_s=0.2))

    [model] = summarise(fleet, NOW).offers

    [one] = model.variants
    (_, seconds) = one.cost[0]
    assert seconds == pytest.approx(0.1, rel=0.1)  # and the way there
    assert one.places == pytest.approx(2.0, rel=0.1)  # 1 + ½ + ½
    assert (one.zone, one.price) == ("edge", 0.01)


def test_the_wait_is_that_of_the_place_that_would_be_done_first() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.1), edge_b=variant(compute_s=0.15))
    fleet.targets["edge/a"].queue_estimate.launch(1, 1.0, NOW)

    state = summarise(fleet, NOW)

    assert state.queue_delay_s == pytest.approx(0.05, abs=0.01)  # the slower one is free


def test_variants_are_told_apart_and_the_wait_beyond_the_soonest_is_said_of_each() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.1), pool_main=variant("fp32", compute_s=0.05))
    fleet.targets["edge/a"].queue_estimate.launch(1, 0.5, NOW)

    [model] = summarise(fleet, NOW).offers

    waits = {one.name: one.wait_s for one in model.variants}
    assert waits == {"fp32": 0.0, "int8": pytest.approx(0.5, rel=0.1)}
    assert {one.name: (one.zone, one.price) for one in model.variants} == {
        "int8": ("edge", 0.01),
        "fp32": ("cloud", 1.0),
    }


def test_what_is_down_and_what_comes_from_another_site_is_left_out() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant())
    site_of(fleet, "south", variant("fp16"))
    fleet.fold(LinkDown("edge/b", "gone"), NOW)

    [model] = summarise(fleet, NOW).offers

    assert [(one.name, one.places) for one in model.variants] == [("fp32", pytest.approx(1.0, rel=0.5))]
    fleet.fold(LinkDown("edge/a", "gone"), NOW)
    assert summarise(fleet, NOW).offers == ()


@pytest.mark.slow
def test_a_summary_of_a_large_site_looks_at_a_part_in_turns_and_counts_for_all() -> None:
    fleet = fleet_of(**{f"edge_e{number}": variant(compute_s=0.1) for number in range(3 * MOST)})

    found = {summarise(fleet, NOW, turn).offers[0].variants[0].places for turn in range(3)}

    assert all(places == pytest.approx(3 * MOST, rel=0.1) for places in found)


def test_a_table_is_told_again_while_it_is_about_right() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.100))
    summary = SiteSummary(fleet, 7, lambda: 0)
    before = summary.offers(NOW)
    fleet.add(TargetSpec("edge/b", "edge", "127.0.0.1:1"), NOW)
    fleet.fold(LinkUp("edge/b", "edge/b", 1, (offer(variant(compute_s=0.090)),)), NOW)

    after = summary.offers(NOW + 1.0)
    assert after[0].variants[0].cost == before[0].variants[0].cost
    assert after[0].variants[0].places > before[0].variants[0].places

    fleet.fold(LinkUp("edge/b", "edge/b", 2, (offer(variant(compute_s=0.030)),)), NOW)
    assert summary.offers(NOW + 2.0)[0].variants[0].cost != before[0].variants[0].cost


def test_a_summary_is_made_once_a_second_and_its_load_counts_what_is_under_way() -> None:
    fleet, under_way = fleet_of(edge_a=variant(compute_s=0.1)), [0]
    summary = SiteSummary(fleet, 7, lambda: under_way[0])
    first = summary.offers(NOW)
    fleet.fold(LinkDown("edge/a", "gone"), NOW)
    assert summary.offers(NOW + 0.5) is first
    assert summary.offers(NOW + 1.0) == ()

    under_way[0] = 3
    load = summary.load(NOW)
    assert (load.epoch, load.queued + load.in_flight) == (7, 3)
    assert summary.load(NOW).sequence == load.sequence + 1


def test_what_a_site_says_comes_through_the_wire() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.1), pool_main=variant("fp32"))
    offers = summarise(fleet, NOW).offers
    assert decode_offers(encode_offers(offers)) == offers


@pytest.mark.parametrize("text", ['"places":-1', '"places":1e9', '"wait_s":-0.1', '"zone":"moon"', '"price":-1'])
def test_an_offer_that_no_site_can_make_is_refused(text: str) -> None:
    raw = b'[{"name":"m","version":"1","variants":[{"name":"a","precision":"a",%s}]}]' % text.encode()
    with pytest.raises(Exception, match="variants"):
        decode_offers(raw)


# the queue, as an upstream gateway sees it


def report(*, in_flight: int, queue_delay_s: float, queued: int = 0, sequence: int = 1) -> LoadReport:
    return LoadReport(1, sequence, queued, in_flight, queue_delay_s)


def filled(places: float, attempts: int, each_s: float = 0.1) -> SiteQueueEstimate:
    queue = SiteQueueEstimate()
    queue.places = places
    for number in range(attempts):
        queue.launch(number, each_s / places, NOW)
    return queue


def test_as_many_requests_as_there_are_places_wait_for_nothing() -> None:
    assert filled(10.0, 10).wait_s(NOW) == 0.0
    assert filled(10.0, 15).wait_s(NOW) == pytest.approx(5 * 0.1 / 10)


def test_others_that_the_site_reports_take_places_too() -> None:
    queue = filled(10.0, 2)
    queue.report(report(in_flight=9, queue_delay_s=0.0), "link", NOW)
    assert queue.wait_s(NOW) == pytest.approx(0.1 / 10)  # one is beyond the place that was free
    queue.report(report(sequence=2, in_flight=10, queued=5, queue_delay_s=0.3), "link", NOW)
    assert queue.wait_s(NOW) == pytest.approx(0.3 + 2 * 0.1 / 10)


def test_a_report_loses_credit_and_is_forgotten_and_an_ack_changes_nothing() -> None:
    queue = filled(10.0, 1)
    queue.report(report(in_flight=1, queue_delay_s=0.3), "link", NOW)
    queue.apply_ack(5.0, NOW)
    assert queue.wait_s(NOW) == pytest.approx(0.3)
    assert queue.wait_s(NOW + STALE_S / 2) == pytest.approx(0.15)
    assert queue.wait_s(NOW + STALE_S) == 0.0


@given(st.floats(1.0, 1e6), st.integers(0, 50), st.floats(0.0, 10.0), st.integers(0, 2**31), st.floats(0.0, 10.0))
def test_a_wait_is_finite_and_never_negative(
    places: float, attempts: int, delay_s: float, in_flight: int, later_s: float
) -> None:
    queue = filled(places, attempts)
    queue.report(report(in_flight=in_flight, queue_delay_s=delay_s), "link", NOW)
    assert 0.0 <= queue.wait_s(NOW + later_s) < 1e6
    for number in range(attempts):
        queue.finish(number, NOW)
    assert queue.wait_s(NOW + STALE_S) == 0.0


# placement over sites


def test_an_attempt_at_a_site_adds_its_part_of_all_places_and_a_variant_waits_for_its_own() -> None:
    fleet = Fleet(lambda _model, _version: "tokens")
    many = VariantOffer("int8", "int8", ((1.0, 0.1),), places=50.0, wait_s=0.2, price=0.01, zone="edge")
    site_of(fleet, "north", many)
    [offered] = fleet.offered("minilm", "1")

    candidate = estimate(offered, 1.0, NOW)

    assert added_work_s(candidate) == pytest.approx(0.1 / 50)
    assert candidate.ahead_s == pytest.approx(0.2)
    assert fleet.queues == 33, "a site is believed to have many places once it has shown that"
    attempts = [AttemptTelemetry(candidate, key, 1.0, NOW) for key in range(30)]
    attempts[0].answered({"queue": 0.5, "compute": 0.1}, None, NOW + 0.7)  # behind others
    assert fleet.queues == 33
    attempts[1].answered({"queue": 0.0, "compute": 0.1}, None, NOW + 0.7)
    assert fleet.queues == 51


def test_a_site_costs_what_its_cheapest_place_costs() -> None:
    fleet = Fleet(lambda _model, _version: "tokens")
    dear, cheap = (VariantOffer(name, name, ((1.0, 0.1),), price=price) for name, price in (("a", 1.0), ("b", 0.02)))
    site_of(fleet, "north", dear, cheap)
    site_of(fleet, "south", variant())
    assert fleet.targets["site/north"].price == 0.02
    assert fleet.targets["site/south"].price == 0.01


def test_a_pinned_request_may_use_a_sites_variant_that_lies_inside() -> None:
    fleet = Fleet(lambda _model, _version: "tokens")
    inner, out = (
        VariantOffer(name, name, ((1.0, 0.1),), zone=zone) for name, zone in (("int8", "edge"), ("fp32", "cloud"))
    )
    site_of(fleet, "north", inner, out)
    placer = Placer(fleet)

    chosen = placer.decide(ask(pin="edge"), NOW).chosen
    assert chosen is not None
    assert chosen.variant.name == "int8"
    assert placer.decide(ask(pin="edge", variant="fp32"), NOW).chosen is None


def test_what_another_gateway_sent_is_not_placed_on_a_site() -> None:
    fleet = fleet_of(edge_slow=variant(compute_s=1.0))
    site_of(fleet, "north", variant(compute_s=0.001))
    placer = Placer(fleet)
    own = OwnPlaces(placer, fleet.sites)

    assert placer.decide(ask(), NOW).chosen.target.id == "site/north"  # type: ignore[union-attr]
    assert own.decide(ask(), NOW).chosen.target.id == "edge/slow"  # type: ignore[union-attr]
    assert own.decide(ask(), NOW, ["edge/slow"]).chosen is None
    fleet.remove("site/north")
    assert fleet.sites == set()

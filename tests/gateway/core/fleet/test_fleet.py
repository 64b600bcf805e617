"""The view of targets: two roads in, and the data plane has the last word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkLoad, LinkRtt, LinkUp
from gateway.core.fleet.offer_index import Offer
from gateway.core.fleet.target import TargetSpec, TargetView
from gateway.core.health.breaker import AttemptVerdict, BreakerState
from gateway.core.placement.placer import Placer
from gateway.core.placement.probing import ProbePlacer
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, spec, variant
from tests.support.interpreted import interpreted_only
from tidegate.types import LoadReport

LOAD = LoadReport(1, 1, queued=2, in_flight=1, queue_delay_s=0.3)


def offered_by(fleet: Fleet) -> list[str]:
    return [one.target.id for one in fleet.offered("minilm", "1")]


def test_a_target_is_down_until_its_link_is_up() -> None:
    fleet = fleet_of(up=False, edge_a=variant())
    assert offered_by(fleet) == []
    assert fleet.targets["edge/a"].state(NOW) == ("down", "not connected yet")
    assert not fleet.usable(NOW)
    assert not fleet.all_tried()

    fleet.fold(LinkUp("edge/a", "edge/a", 1, (offer(),)), NOW)
    assert offered_by(fleet) == ["edge/a"]
    assert fleet.targets["edge/a"].state(NOW) == ("ready", "")
    assert fleet.usable(NOW)
    assert fleet.all_tried()
    assert repr(fleet) == "<Fleet 1 of 1 targets up, 1 models>"


def test_a_broken_link_takes_it_out_whatever_mqtt_says() -> None:
    fleet = fleet_of(edge_a=variant())
    fleet.fold(LinkDown("edge/a", "connection refused"), NOW + 5.0)
    fleet.heard("edge/a", load=LOAD, doubt="", now=NOW + 6.0)

    assert offered_by(fleet) == []
    assert fleet.targets["edge/a"].state(NOW + 6.0) == ("down", "connection refused")
    assert fleet.targets["edge/a"].since == NOW + 5.0
    assert "down (connection refused)" in repr(fleet.targets["edge/a"])


def test_the_instant_of_going_down_is_that_of_the_first_word_of_it() -> None:
    fleet = fleet_of(up=False, edge_a=variant())
    fleet.fold(LinkDown("edge/a", "refused"), NOW + 1.0)
    fleet.fold(LinkDown("edge/a", "still refused"), NOW + 9.0)
    assert fleet.targets["edge/a"].since == NOW + 1.0


def test_a_working_link_stays_in_use_while_mqtt_doubts_it() -> None:
    fleet = fleet_of(edge_a=variant())
    fleet.heard("edge/a", load=None, doubt="suspect: no heartbeat for 7 s", now=NOW)

    assert offered_by(fleet) == ["edge/a"]
    assert fleet.targets["edge/a"].state(NOW) == ("suspect", "suspect: no heartbeat for 7 s")


def test_a_device_that_takes_no_new_work_gets_none() -> None:
    fleet = fleet_of(edge_a=variant())
    fleet.heard("edge/a", load=None, doubt="", accepting=False, now=NOW)
    assert offered_by(fleet) == []
    assert fleet.targets["edge/a"].state(NOW) == ("down", "it takes no new work")

    fleet.heard("edge/a", load=None, doubt="", accepting=True, now=NOW)
    assert offered_by(fleet) == ["edge/a"]


def test_a_model_that_soaks_is_on_offer_and_one_that_loads_is_not() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant())
    fleet.fold(LinkLoad("edge/a", LOAD, (offer(state="soaking"),)), NOW)
    fleet.fold(LinkLoad("edge/b", LOAD, (offer(state="loading"),)), NOW)

    assert offered_by(fleet) == ["edge/a"]


def test_the_slots_of_all_targets_are_counted_as_they_come_and_go() -> None:
    talks = replace(variant("int4"), slots=4)
    fleet = fleet_of(edge_a=talks, edge_b=talks, pool_main=variant())
    assert fleet.slots == 8
    fleet.fold(LinkDown("edge/a", "reset"), NOW)
    assert fleet.slots == 4
    fleet.remove("edge/b")
    assert fleet.slots == 0


def test_offers_may_change_over_the_link_and_over_mqtt() -> None:
    fleet = fleet_of(edge_a=variant())
    fleet.fold(LinkLoad("edge/a", LOAD, (offer(state="loading"),)), NOW)
    assert offered_by(fleet) == []
    assert fleet.targets["edge/a"].queue_estimate.load == LOAD

    fleet.heard("edge/a", load=None, doubt="", offers=(offer(),), now=NOW)
    assert offered_by(fleet) == ["edge/a"]


def test_a_load_without_offers_leaves_them_alone() -> None:
    fleet = fleet_of(edge_a=variant())
    fleet.fold(LinkLoad("edge/a", LOAD), NOW)
    assert offered_by(fleet) == ["edge/a"]


def test_a_load_on_the_link_ends_a_silence_also_where_nobody_waits_for_its_answer_any_more() -> None:
    fleet = fleet_of(edge_a=variant())
    link = fleet.targets["edge/a"].link
    link.sent(0, NOW)
    link.accepted(0, NOW + 0.005)
    link.sent(1, NOW + 1.0)
    link.ended(1, NOW + 1.2, heard=False)
    assert link.trust(NOW + 1.3) < 0.5
    fleet.fold(LinkLoad("edge/a", LOAD), NOW + 1.3)
    assert link.trust(NOW + 9.0) == 1.0


def test_measured_round_trips_reach_the_link_estimate() -> None:
    fleet = fleet_of(edge_a=variant())
    fleet.fold(LinkRtt("edge/a", 0.042), NOW)
    assert fleet.targets["edge/a"].link.rtt_s == 0.042


def test_news_of_targets_that_are_gone_is_ignored() -> None:
    fleet = fleet_of(edge_a=variant())
    fleet.remove("edge/a")
    fleet.remove("edge/a")
    fleet.fold(LinkUp("edge/a", "edge/a", 1, (offer(),)), NOW)
    fleet.heard("edge/a", load=LOAD, doubt="", now=NOW)

    assert offered_by(fleet) == []
    assert fleet.targets == {}


def test_a_target_may_be_limited_to_some_models() -> None:
    fleet = Fleet(lambda model, version: "tokens")
    fleet.add(TargetSpec("pool/a", "pool", "x:1", models=("digits",)), NOW)
    fleet.fold(LinkUp("pool/a", "pool/a", 1, (offer(),)), NOW)
    assert offered_by(fleet) == []


def test_devices_that_mqtt_found_need_not_be_reached_before_the_gateway_is_ready() -> None:
    fleet = fleet_of(pool_a=variant())
    fleet.add(spec("edge/b", static=False), NOW)
    assert fleet.all_tried()


def test_a_new_process_starts_with_a_closed_breaker_and_a_new_connection_with_a_closed_path() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant())
    target = fleet.targets["edge/a"]
    for _ in range(5):
        target.breaker.record(AttemptVerdict.FAILURE, NOW, 0.5)
    target.path_breaker.trip("silent", NOW, 0.5)
    assert target.state(NOW)[0] == "down"
    assert not target.allows(NOW)

    fleet.fold(LinkUp("edge/a", "edge/a", 1, (offer(),)), NOW)
    assert target.path_breaker.state is BreakerState.OPEN  # the same process on the same link: nothing new

    fleet.fold(LinkDown("edge/a", "reset"), NOW)
    fleet.fold(LinkUp("edge/a", "edge/a", 1, (offer(),)), NOW)
    assert (target.path_breaker.state, target.breaker.state) == (BreakerState.CLOSED, BreakerState.OPEN)
    assert target.ejected

    fleet.fold(LinkUp("edge/a", "edge/a", 2, (offer(),)), NOW)
    assert target.state(NOW) == ("ready", "")
    assert fleet.balance.ejected == ()


def test_a_model_whose_feature_became_known_is_priced_anew() -> None:
    known: dict[str, str] = {}
    fleet = Fleet(lambda model, version: known.get(model, "items"))  # type: ignore[arg-type,return-value]
    fleet.add(spec("pool/a"), NOW)
    fleet.fold(LinkUp("pool/a", "pool/a", 1, (offer(variant(compute_s=None)),)), NOW)
    before = fleet.offered("minilm", "1")[0].cost.predict_s(1.0)

    known["minilm"] = "tokens"
    fleet.repriced()

    assert fleet.offered("minilm", "1")[0].cost.predict_s(1.0) == pytest.approx(0.010)
    assert before == pytest.approx(0.020)


def test_row_13_a_ghost_that_mqtt_tells_of_gets_no_request_however_often_it_is_told_of() -> None:
    fleet = fleet_of(edge_a=variant())
    fleet.add(spec("edge/ghost", static=False), NOW)
    placer = ProbePlacer(Placer(fleet), fleet, lambda: 0.0)  # would explore whenever it may
    for sequence in range(20):
        now = NOW + 20.0 + sequence
        fleet.heard("edge/ghost", load=LoadReport(1, sequence, 0, 0, 0.0), doubt="", offers=(offer(),), now=now)
        decision = placer.decide(ask(at=now)._replace(priority=4), now)
        assert decision.chosen is not None and decision.chosen.target.id == "edge/a"
    assert fleet.balance.ejected == ()


def test_row_13_old_and_repeated_reports_change_nothing() -> None:
    fleet = fleet_of(edge_a=variant())
    queue_estimate = fleet.targets["edge/a"].queue_estimate
    fleet.heard("edge/a", load=LoadReport(2, 7, 0, 0, 0.2), doubt="", now=NOW)
    for epoch, sequence in ((2, 7), (2, 3), (1, 99)):
        fleet.heard("edge/a", load=LoadReport(epoch, sequence, 9, 9, 9.0), doubt="", now=NOW)
    assert queue_estimate.wait_s(NOW) == pytest.approx(0.2)


@interpreted_only
def test_targets_that_come_up_one_by_one_are_listed_once_each() -> None:
    """The index is kept up offer by offer: what is listed is counted, not timed."""
    listed = 0

    class Counting(Fleet):
        def _ready_offers(self, target: TargetView) -> Iterator[Offer]:
            nonlocal listed
            for one in super()._ready_offers(target):
                listed += 1
                yield one

    fleet = Counting(lambda _model, _version: "tokens")
    for number in range(300):
        fleet.add(spec(f"edge/{number}"), NOW)
        fleet.fold(LinkUp(f"edge/{number}", f"edge/{number}", 1, (offer(),)), NOW)
    assert len(fleet.offered("minilm", "1")) == listed == 300

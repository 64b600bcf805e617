"""Balance: nobody takes out everything, and who is back is loaded gently."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.link_estimate import SLACK_S
from gateway.core.fleet.ejection import EjectionPolicy, slow_start_share
from gateway.core.fleet.fleet import STATIC_REDIAL_S, Fleet
from gateway.core.fleet.indexed_set import IndexedSet
from gateway.core.fleet.link_events import LinkDown, LinkRtt, LinkUp
from gateway.core.fleet.target import TargetView
from gateway.core.health.breaker import AttemptVerdict, BreakerState
from gateway.core.health.success_window import SuccessWindow
from gateway.core.placement.placer import Placer
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, spec, variant


def fail(target: TargetView, times: int = 5, at: float = NOW) -> None:
    for _ in range(times):
        target.breaker.record(AttemptVerdict.FAILURE, at, 0.5)


def edges(count: int, *, pools: int = 0) -> Fleet:
    names = {f"edge_{n}": variant("int8") for n in range(count)} | {f"pool_{n}": variant() for n in range(pools)}
    return fleet_of(**names)


def taken(fleet: Fleet, now: float = NOW) -> set[str]:
    return {target.id for target in fleet.targets.values() if target.takes(now)}


@pytest.mark.parametrize(
    ("since_s", "share"), [(0.0, 0.1), (0.5, 0.1), (1.0, 0.1), (5.0, 0.5), (10.0, 1.0), (99.0, 1.0)]
)
def test_the_share_grows_from_a_tenth_to_all_in_ten_seconds(since_s: float, share: float) -> None:
    assert slow_start_share(since_s) == pytest.approx(share)


def test_up_to_half_of_the_edges_are_taken_out_and_no_more() -> None:
    fleet = edges(4, pools=1)
    for number in range(2):
        fail(fleet.targets[f"edge/{number}"])
    assert taken(fleet) == {"edge/2", "edge/3", "pool/0"}
    assert repr(fleet.balance) == "<EjectionPolicy 2 of 5 ejected>"

    fail(fleet.targets["edge/2"])
    assert taken(fleet) == {"edge/0", "edge/1", "edge/2", "edge/3", "pool/0"}
    assert fleet.balance.panic
    assert "PANIC" in repr(fleet.balance)


def test_where_pools_are_well_too_many_broken_edges_are_spared_without_panic() -> None:
    fleet = edges(1, pools=1)
    fail(fleet.targets["edge/0"])
    assert taken(fleet) == {"edge/0", "pool/0"}
    assert not fleet.balance.panic
    assert "edges spared" in repr(fleet.balance)


def test_a_pool_is_taken_out_while_edges_are_well() -> None:
    fleet = edges(2, pools=1)
    fail(fleet.targets["pool/0"])
    assert taken(fleet) == {"edge/0", "edge/1"}
    assert fleet.retry_after_s(NOW + 0.1) == pytest.approx(0.4)


def test_a_configured_target_that_is_down_is_dialled_again_soon_and_a_found_one_may_never_be_back() -> None:
    fleet = edges(1)
    assert fleet.retry_after_s(NOW) is None
    fleet.fold(LinkDown("edge/0", "silent for 3 heartbeats", in_order=True), NOW)
    assert fleet.retry_after_s(NOW) == STATIC_REDIAL_S
    fleet.remove("edge/0")
    fleet.add(spec("edge/1", static=False), NOW)
    fleet.fold(LinkDown("edge/1", "silent for 3 heartbeats", in_order=True), NOW)
    assert fleet.retry_after_s(NOW) is None


def test_the_last_target_is_never_taken_out() -> None:
    fleet = edges(0, pools=1)
    fail(fleet.targets["pool/0"])
    assert taken(fleet) == {"pool/0"}
    assert Placer(fleet).decide(ask(), NOW).chosen is not None


def test_one_that_is_spared_is_believed_by_its_record() -> None:
    fleet = edges(1, pools=1)
    fail(fleet.targets["edge/0"], times=8)
    assert fleet.targets["edge/0"].trust(NOW) == pytest.approx(1 / 10)
    decision = Placer(fleet).decide(ask(), NOW)
    assert decision.chosen is not None and decision.chosen.target.id == "pool/0"
    assert [one.target.id for one in decision.candidates] == ["edge/0", "pool/0"]


def test_targets_whose_link_is_down_count_for_neither_side() -> None:
    fleet = edges(4)
    fail(fleet.targets["edge/0"])
    fail(fleet.targets["edge/1"])
    fleet.fold(LinkDown("edge/0", "reset"), NOW)
    assert fleet.balance.ejected == ("edge/1",)
    fleet.remove("edge/1")
    assert fleet.balance.ejected == ()
    assert repr(fleet.balance) == "<EjectionPolicy 0 of 2 ejected>"


def test_ejections_are_told_once_and_so_are_returns() -> None:
    fleet = edges(3)
    told: list[tuple[str, bool]] = []
    fleet.on_health = lambda target, _now: told.append((target.id, target.ejected))
    target = fleet.targets["edge/0"]

    fail(target, times=9)
    for _ in range(2):
        assert target.allows(NOW + 1.0)
        assert target.breaker.launched(NOW + 1.0)
        target.breaker.record(AttemptVerdict.SUCCESS, NOW + 1.0, 0.5, probe=True)

    assert told == [("edge/0", True), ("edge/0", False)]


def test_who_is_trusted_again_starts_slowly_and_says_so() -> None:
    fleet = edges(3)
    target = fleet.targets["edge/0"]
    target.queue_estimate.launch(1, 0.050, NOW + 20.0)
    fail(target, at=NOW + 20.0)
    target.breaker.heard(NOW + 20.0)
    target.breaker.heard(NOW + 20.0)

    assert target.wait_s(NOW + 20.0) == pytest.approx(0.5)
    assert target.state(NOW + 24.0) == ("ready", "warming up: counts for 40% of its capacity")
    target.queue_estimate.launch(2, 0.050, NOW + 30.0)
    assert target.wait_s(NOW + 30.0) == target.queue_estimate.wait_s(NOW + 30.0)
    assert target.state(NOW + 30.0) == ("ready", "")


def test_one_request_at_a_time_is_predicted_as_ever_in_a_slow_start() -> None:
    fleet = edges(2)
    fleet.fold(LinkUp("edge/0", "edge/0", 2, (offer(variant("int8")),)), NOW + 20.0)
    assert fleet.targets["edge/0"].wait_s(NOW + 20.0) == 0.0


@pytest.mark.parametrize(
    ("epoch", "at", "share"),
    [
        (2, NOW + 20.0, 0.1),  # a new process
        (1, NOW + 20.0, 1.0),  # a new connection to the same one
        (2, NOW + 5.0, 1.0),  # a fleet that has just begun
    ],
)
def test_only_a_new_process_in_a_settled_fleet_starts_slowly(epoch: int, at: float, share: float) -> None:
    fleet = edges(2)
    fleet.fold(LinkDown("edge/0", "reset"), at)
    fleet.fold(LinkUp("edge/0", "edge/0", epoch, (offer(variant("int8")),)), at)
    assert slow_start_share(at - fleet.targets["edge/0"].warm_since) == pytest.approx(share)


def test_a_path_that_heals_does_not_start_its_target_slowly() -> None:
    fleet = edges(3)
    target = fleet.targets["edge/0"]
    target.path_breaker.trip("silent", NOW + 20.0, 0.5)
    assert target.ejected
    for _ in range(2):
        fleet.fold(LinkRtt("edge/0", 0.01), NOW + 21.0)
    assert not target.ejected
    assert target.state(NOW + 21.0) == ("ready", "")


def test_attempts_that_outlive_their_target_leave_the_count_alone() -> None:
    fleet = edges(3)
    gone = fleet.targets["edge/0"]
    fleet.remove("edge/0")
    fail(gone)
    assert repr(fleet.balance) == "<EjectionPolicy 0 of 2 ejected>"


def test_attempts_of_the_process_before_do_not_start_the_new_one_slowly() -> None:
    fleet = edges(2)
    target = fleet.targets["edge/0"]
    before = target.breaker
    fleet.fold(LinkUp("edge/0", "edge/0", 2, target.offers), NOW)
    for _ in range(5):
        before.record(AttemptVerdict.FAILURE, NOW + 5.0, 0.5)
    assert slow_start_share(NOW + 5.0 - target.warm_since) == 1.0
    assert not target.ejected


def test_three_attempts_without_an_ack_take_the_path_out_after_three_times_the_patience() -> None:
    fleet = edges(3)
    target, link = fleet.targets["edge/0"], fleet.targets["edge/0"].link
    for number in range(40):
        link.sent(number, NOW)
        link.accepted(number, NOW + 0.005)
    for number in range(40, 43):
        link.sent(number, NOW + 1.0)
    patience_s = link.patience_s(NOW + 1.0)
    assert patience_s < 0.06

    assert target.takes(NOW + 1.0 + 2.9 * patience_s)
    assert target.takes(NOW + 1.0 + 3.1 * patience_s), "seen once"
    assert not target.takes(NOW + 1.0 + 3.1 * patience_s + 1.01 * SLACK_S)
    assert target.state(NOW + 1.2)[1].startswith("the way to it kept failing (three requests were not acknowledged)")
    assert target.breaker.state is BreakerState.CLOSED, "the process has done nothing wrong"


def test_two_attempts_without_an_ack_do_not() -> None:
    fleet = edges(3)
    link = fleet.targets["edge/0"].link
    link.sent(0, NOW)
    link.accepted(0, NOW + 0.005)
    for number in (1, 2):
        link.sent(number, NOW + 1.0)
    assert fleet.targets["edge/0"].takes(NOW + 60.0)


def test_a_frame_starts_the_silence_anew() -> None:
    fleet = edges(3)
    target, link = fleet.targets["edge/0"], fleet.targets["edge/0"].link
    link.sent(0, NOW)
    link.accepted(0, NOW + 0.005)
    for number in range(1, 4):
        link.sent(number, NOW + 1.0)
    silence_s = 3.5 * link.patience_s(NOW + 1.0)
    link.heard(NOW + 1.0 + 0.5 * silence_s)
    assert target.takes(NOW + 1.0 + silence_s)
    assert target.takes(NOW + 1.0 + 2.0 * silence_s), "seen once"
    assert not target.takes(NOW + 1.0 + 2.0 * silence_s + 1.01 * SLACK_S)


def test_the_states_of_an_ejected_target_are_told_in_words() -> None:
    fleet = edges(3)
    target = fleet.targets["edge/0"]
    fail(target)
    assert target.state(NOW) == ("down", "it kept failing (5 calls in a row failed); next probe in 0.5 s")
    target.breaker.launched(NOW + 1.0)
    assert target.state(NOW) == ("suspect", "it kept failing (5 calls in a row failed) and is being probed")
    fail(fleet.targets["edge/1"])
    assert target.state(NOW)[1].endswith("as most do: used all the same")


MEMBERS = st.sampled_from(["edge/0", "edge/1", "edge/2", "pool/0"])
EVENTS = st.sampled_from(["fail", "heal", "mute", "down", "up", "restart", "remove", "add", "drain", "accept"])


@pytest.mark.slow
@given(st.lists(st.tuples(MEMBERS, EVENTS), max_size=60))
def test_whatever_happens_somebody_stays_and_the_counts_are_right(steps: list[tuple[str, str]]) -> None:
    fleet, now = edges(3, pools=1), NOW
    for target_id, event in steps:
        now += 0.3
        target = fleet.targets.get(target_id)
        if target is None:
            fleet.add(spec(target_id), now)
        elif event == "fail":
            fail(target, at=now)
        elif event == "heal":
            target.breaker.heard(now)
            target.path_breaker.heard(now)
        elif event == "mute":
            target.path_breaker.trip("silent", now, 0.5)
        elif event == "down":
            fleet.fold(LinkDown(target_id, "gone"), now)
        elif event in ("up", "restart"):
            epoch = target.epoch + (event == "restart")
            fleet.fold(LinkUp(target_id, target_id, epoch, (offer(),)), now)
        elif event == "remove":
            fleet.remove(target_id)
        elif event in ("drain", "accept"):
            fleet.heard(target_id, load=None, doubt="", accepting=event == "accept", now=now)

        usable = [one for one in fleet.targets.values() if one.up and one.accepting]
        ejected = [
            one
            for one in usable
            if one.breaker.state is not BreakerState.CLOSED or one.path_breaker.state is not BreakerState.CLOSED
        ]
        assert set(fleet.balance.ejected) == {one.id for one in ejected}
        out = [one for one in usable if not one.takes(now)]
        assert 2 * len(out) <= len(usable)
        edges_up = [one for one in usable if one.spec.tier == "edge"]
        assert 2 * len([one for one in out if one.spec.tier == "edge"]) <= len(edges_up)
        assert {one.target.id for one in fleet.offered("minilm", "1")} == {one.id for one in usable if one.offers}, (
            "the index holds exactly the ready offers of usable targets"
        )


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans())))
def test_a_roster_is_a_dictionary_that_can_be_indexed(steps: list[tuple[int, bool]]) -> None:
    roster: IndexedSet[int, int] = IndexedSet()
    model: dict[int, int] = {}
    for serial, (key, put) in enumerate(steps):
        if put:
            roster.put(key, serial)
            model[key] = serial
        elif key in model:
            roster.drop(key)
            del model[key]
        assert sorted(roster.items) == sorted(model.values())
        assert {key: roster.get(key) for key in model} == model
        assert len(roster) == len(model)
    assert roster.get(99) is None
    assert repr(roster) == f"<IndexedSet of {len(model)}>"


@given(st.lists(st.tuples(st.floats(0.0, 4.0), st.booleans()), max_size=60))
def test_a_success_window_counts_the_last_ten_seconds_exactly(steps: list[tuple[float, bool]]) -> None:
    window, now, calls = SuccessWindow(), NOW, list[tuple[int, bool]]()
    for pause_s, success in steps:
        now += pause_s
        window.add(now, success=success)
        calls.append((int(now), success))
        recent = [good for second, good in calls if second > int(now) - 10]
        assert window.counts(now) == (sum(recent), len(recent) - sum(recent))
    assert window.counts(now + 10.0) == (0, 0)
    window.clear()
    assert repr(window) == "<SuccessWindow 0 good, 0 bad>"


def test_a_balance_of_nobody_is_calm() -> None:
    balance = EjectionPolicy()
    balance.forget("edge/0")
    assert not balance.panic
    assert not balance.spares(edge=True)

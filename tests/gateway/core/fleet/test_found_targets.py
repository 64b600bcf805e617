"""What sources of discovery say, turned into one set: who owns an id, what stays, what is over, and when."""

from __future__ import annotations

from gateway.core.fleet.found_targets import LINGER_S, STATIC, Found, FoundTargets
from gateway.core.fleet.target import TargetSpec

NOW = 100.0


def spec(name: str, address: str = "10.0.0.1:1") -> TargetSpec:
    return TargetSpec(f"pool/{name}", "pool", address)


def found(name: str, address: str = "10.0.0.1:1", *, draining: bool = False, lost: bool = False) -> Found:
    return Found(spec(name, address), draining=draining, lost=lost)


def dropped(targets: FoundTargets, now: float, *, busy: bool = False, up: bool = True) -> list[str]:
    return targets.drop(now, busy=lambda _: busy, up=lambda _: up)


def refusals(targets: FoundTargets) -> dict[tuple[str, str], str]:
    return {(source, target_id): why for source, target_id, why, _ in targets.refusals()}


def test_the_configurations_list_is_there_before_any_source_was_heard() -> None:
    targets = FoundTargets([spec("a")], ["dns:pools"])
    assert targets.targets["pool/a"].source == STATIC
    assert not targets.settled
    targets.away("dns:pools", "no answer", NOW)
    assert targets.settled


def test_a_source_that_is_away_keeps_what_it_last_said() -> None:
    targets = FoundTargets((), ["s"])
    targets.say("s", [found("a"), found("b")], NOW)
    targets.away("s", "SERVFAIL", NOW + 1)
    targets.away("s", "timeout", NOW + 9)
    assert dropped(targets, NOW + 1e6) == []
    assert {one: target.leaving for one, target in targets.targets.items()} == {"pool/a": "", "pool/b": ""}
    assert (targets.sources["s"].away_since, targets.sources["s"].why) == (NOW + 1, "timeout")
    targets.say("s", [found("a"), found("b")], NOW + 10)
    assert (targets.sources["s"].away_since, targets.sources["s"].why) == (None, "")


def test_a_target_that_is_left_out_takes_nothing_new_and_is_dropped_after_its_last_answer() -> None:
    targets = FoundTargets((), ["s"], drain_s=30.0)
    targets.say("s", [found("a"), found("b")], NOW)
    targets.say("s", [found("b")], NOW + 1)
    assert "does not list it" in targets.targets["pool/a"].leaving
    assert dropped(targets, NOW + 1 + LINGER_S - 0.1) == []
    assert dropped(targets, NOW + 1 + LINGER_S, busy=True) == []
    assert dropped(targets, NOW + 1 + LINGER_S) == ["pool/a"]
    assert list(targets.targets) == ["pool/b"]


def test_a_target_that_never_ends_what_it_has_is_dropped_at_the_bound() -> None:
    targets = FoundTargets((), ["s"], drain_s=30.0)
    targets.say("s", [found("a")], NOW)
    targets.say("s", [], NOW)
    assert dropped(targets, NOW + 29.9, busy=True) == []
    assert dropped(targets, NOW + 30.0, busy=True) == ["pool/a"]


def test_a_target_that_comes_back_in_time_was_never_away() -> None:
    targets = FoundTargets((), ["s"])
    targets.say("s", [found("a")], NOW)
    targets.say("s", [], NOW + 1)
    targets.say("s", [found("a")], NOW + 2)
    assert targets.targets["pool/a"].leaving == ""
    assert dropped(targets, NOW + 1e6) == []


def test_an_id_outlives_its_address() -> None:
    targets = FoundTargets((), ["s"])
    targets.say("s", [found("a", "10.0.0.1:1")], NOW)
    targets.say("s", [found("a", "10.0.0.2:1")], NOW + 1)
    assert targets.targets["pool/a"].spec.address == "10.0.0.2:1"
    assert not targets.may_drop


def test_draining_is_said_and_taken_back() -> None:
    targets = FoundTargets((), ["s"])
    targets.say("s", [found("a", draining=True)], NOW)
    assert "says that it ends" in targets.targets["pool/a"].leaving
    assert dropped(targets, NOW + 1e6) == []  # it is listed: only its source takes it out
    targets.say("s", [found("a")], NOW + 1)
    assert targets.targets["pool/a"].leaving == ""


def test_the_second_source_of_an_id_is_refused_by_name_until_the_first_lets_go() -> None:
    targets = FoundTargets([spec("a", "10.0.0.1:1")], ["s", "t"])
    targets.say("t", [found("a", "10.0.0.9:1"), found("b", "10.0.0.3:1")], NOW)
    targets.say("s", [found("b", "10.0.0.4:1")], NOW + 1)
    assert targets.targets["pool/a"].spec.address == "10.0.0.1:1"
    assert targets.targets["pool/b"].spec.address == "10.0.0.3:1"
    assert refusals(targets) == {
        ("t", "pool/a"): "static said it first, at 10.0.0.1:1: that one is used",
        ("s", "pool/b"): "t said it first, at 10.0.0.3:1: that one is used",
    }
    targets.say("t", [], NOW + 2)
    assert targets.targets["pool/b"].spec.address == "10.0.0.4:1"
    assert refusals(targets) == {}


def test_one_id_at_two_addresses_within_a_source_is_refused_too() -> None:
    targets = FoundTargets((), ["s"])
    targets.say("s", [found("a", "10.0.0.1:1"), found("a", "10.0.0.2:1")], NOW)
    assert targets.targets["pool/a"].spec.address == "10.0.0.1:1"
    assert "twice" in refusals(targets)["s", "pool/a"]
    targets.say("s", [found("a", "10.0.0.1:1")], NOW + 1)
    assert refusals(targets) == {}


def test_a_target_reported_as_lost_stays_while_its_link_works() -> None:
    targets = FoundTargets((), ["s"])
    targets.say("s", [found("a", lost=True)], NOW)
    assert targets.targets["pool/a"].leaving == ""
    assert dropped(targets, NOW + 1e6, up=True) == []
    assert dropped(targets, NOW + 1e6, up=False) == ["pool/a"]
    assert targets.targets == {}


def test_a_lost_target_that_was_dropped_is_not_opened_again_before_it_is_said_to_live() -> None:
    targets = FoundTargets((), ["s"])
    targets.say("s", [found("a", lost=True)], NOW)
    assert dropped(targets, NOW, up=False) == ["pool/a"]
    targets.say("s", [found("a", lost=True), found("b")], NOW + 1)
    assert list(targets.targets) == ["pool/b"]
    targets.say("s", [found("a", "10.0.0.2:1"), found("b")], NOW + 2)
    assert targets.targets["pool/a"].spec.address == "10.0.0.2:1"
    targets.say("s", [found("a", lost=True)], NOW + 3)
    assert dropped(targets, NOW + 4, up=True) == []

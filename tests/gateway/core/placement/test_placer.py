"""Placement: the cheapest target that is predicted to make it, or a refusal that says why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkLoad, LinkUp
from gateway.core.health.breaker import AttemptVerdict
from gateway.core.placement.interval import chance_from_margin
from gateway.core.placement.placer import Candidate, Decision, Placer, estimate
from gateway.core.request.hedging import fallback_at, is_silent
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, spec, variant
from tidegate.outcome import DeadlineExceeded, NothingAlive
from tidegate.types import LoadReport


def chosen(decision: Decision) -> tuple[str, str, str]:
    assert decision.refusal is None
    assert decision.chosen is not None
    return decision.chosen.target.id, decision.chosen.variant.name, decision.reason


def refused(decision: Decision) -> str:
    assert decision.chosen is None
    assert decision.best_other() is None
    assert decision.refusal is not None
    return decision.refusal.message


def test_an_edge_is_cheapest_while_it_makes_the_deadline() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.010))
    assert chosen(Placer(fleet).decide(ask(budget_s=2.0), NOW)) == ("edge/a", "int8", "cheapest")


def test_a_dearer_target_is_taken_when_only_it_is_sure_to_make_it() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.010))
    assert chosen(Placer(fleet).decide(ask(budget_s=0.110), NOW)) == ("pool/main", "fp32", "faster")


def test_when_nobody_is_sure_the_earliest_finish_has_the_best_chance() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.050))
    assert chosen(Placer(fleet).decide(ask(budget_s=0.040), NOW)) == ("pool/main", "fp32", "faster")


def test_twins_share_the_work_by_earliest_finish() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.010), edge_b=variant(compute_s=0.011))
    placer, went = Placer(fleet), []
    for key in range(6):
        candidate = placer.decide(ask(), NOW).chosen
        assert candidate is not None
        candidate.target.queue_estimate.launch(key, candidate.compute_s, NOW)
        went.append(candidate.target.id)
    assert went == ["edge/a", "edge/b"] * 3


def test_the_margin_grows_with_what_is_uncertain() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant())
    calm, restless = fleet.offered("minilm", "1")
    fleet.targets["edge/b"].link.jitter_s = 0.050
    assert estimate(restless, 1.0, NOW).margin_s > 2 * estimate(calm, 1.0, NOW).margin_s


def test_a_reported_queue_moves_work_elsewhere() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant())
    fleet.fold(LinkLoad("edge/a", LoadReport(1, 1, 9, 1, 0.5)), NOW)
    assert chosen(Placer(fleet).decide(ask(), NOW))[0] == "edge/b"


def _freeze(fleet: Fleet, target_id: str, *, at: float = NOW) -> None:
    """A target that has acknowledged before is sent an attempt, and says nothing."""
    link = fleet.targets[target_id].link
    link.sent(1, at)
    link.accepted(1, at + 0.001)
    link.ended(1, at + 0.002, heard=True)
    link.sent(2, at + 0.01)


def test_a_link_is_distrusted_while_it_is_silent_and_not_after_it_has_timed_out() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.010), edge_b=variant(compute_s=0.012), pool_main=variant())
    placer = Placer(fleet)
    _freeze(fleet, "edge/a")
    assert chosen(placer.decide(ask(), NOW + 0.011))[0] == "edge/a"

    assert chosen(placer.decide(ask(at=NOW + 0.2), NOW + 0.2))[0] == "edge/b"

    fleet.targets["edge/a"].link.accepted(2, NOW + 0.3)
    believed = placer.decide(ask(at=NOW + 0.3), NOW + 0.3).candidates[0]
    assert (believed.target.id, believed.trust) == ("edge/a", 1.0)


def test_frozen_targets_do_not_hedge_each_other() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.010), edge_b=variant(compute_s=0.010), pool_main=variant(compute_s=0.1))
    for target_id in ("edge/a", "edge/b"):
        _freeze(fleet, target_id)

    decision = Placer(fleet).decide(ask(at=NOW + 0.2), NOW + 0.2)
    beside = Placer(fleet, _the_first).decide(ask(at=NOW + 0.2), NOW + 0.2).best_other()

    assert chosen(decision) == ("pool/main", "fp32", "faster")
    assert beside is not None and beside.target.id == "pool/main"


def test_where_all_are_silent_the_earliest_finish_is_asked_all_the_same() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.010), pool_main=variant(compute_s=0.1))
    for target_id in ("edge/a", "pool/main"):
        _freeze(fleet, target_id)

    assert chosen(Placer(fleet).decide(ask(at=NOW + 0.2), NOW + 0.2)) == ("edge/a", "fp32", "faster")


def test_the_only_candidate_is_said_to_be_the_only_one() -> None:
    assert chosen(Placer(fleet_of(pool_main=variant())).decide(ask(), NOW)) == ("pool/main", "fp32", "only")


@pytest.mark.parametrize(("rows", "longest_row"), [(5, 16), (1, 129)])
def test_what_is_too_large_for_an_edge_goes_to_the_pool(rows: int, longest_row: int) -> None:
    fleet = fleet_of(edge_a=variant("int8", max_batch=4, max_tokens=128), pool_main=variant())
    assert chosen(Placer(fleet).decide(ask(rows=rows, longest_row=longest_row), NOW))[0] == "pool/main"
    assert chosen(Placer(fleet).decide(ask(rows=4, longest_row=128), NOW))[0] == "edge/a"


def test_a_demanded_variant_is_honoured_by_name_or_precision() -> None:
    fleet = fleet_of(edge_a=variant("int8"), pool_main=variant("fp32"))
    assert chosen(Placer(fleet).decide(ask(variant="fp32"), NOW)) == ("pool/main", "fp32", "demanded")
    message = refused(Placer(fleet).decide(ask(variant="bf16"), NOW))
    assert "minilm version 1 in variant bf16" in message
    assert "edge/a has int8; pool/main has fp32" in message


def test_an_open_breaker_and_an_excluded_target_are_no_candidates() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant())
    for _ in range(5):
        fleet.targets["edge/a"].breaker.record(AttemptVerdict.FAILURE, NOW, 0.5)
    assert chosen(Placer(fleet).decide(ask(), NOW, exclude=["edge/b"]))[0] == "pool/main"


def test_the_refusal_names_each_targets_reason() -> None:
    fleet = fleet_of(edge_a=variant("int8", max_batch=4, max_tokens=128), pool_main=variant(), pool_b=variant())
    fleet.fold(LinkDown("pool/main", "connection refused"), NOW)
    fleet.add(spec("edge/new"), NOW)
    fleet.add(spec("edge/other"), NOW)
    fleet.fold(LinkUp("edge/other", "edge/other", 1, ()), NOW)
    fleet.fold(LinkUp("edge/new", "edge/new", 1, (offer(state="warming"),)), NOW)

    message = refused(Placer(fleet).decide(ask(rows=40, longest_row=200, at=NOW + 3.2), NOW + 3.2, exclude=["pool/b"]))

    assert message == (
        "no target offers minilm version 1 for 40 rows × 200: edge/a takes at most 4 rows; "
        "pool/main is down since 3.2 s: connection refused; pool/b was tried; edge/new has it in state warming; "
        "edge/other does not offer it"
    )


def test_a_target_under_probation_says_so() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant("bf16"))
    breaker = fleet.targets["edge/a"].breaker
    for _ in range(5):
        breaker.record(AttemptVerdict.FAILURE, NOW, 0.5)
    breaker.launched(NOW + 1.0)
    refusal = Placer(fleet).decide(ask(variant="fp32"), NOW + 1.0).refusal
    assert "edge/a is suspect: it kept failing (5 calls in a row failed) and is being probed" in str(refusal)


def test_no_targets_at_all_is_a_reason_too() -> None:
    decision = Placer(Fleet(lambda model, version: "tokens")).decide(ask(), NOW)
    assert isinstance(decision.refusal, NothingAlive)
    assert "there are no targets" in refused(decision)


def test_what_is_provably_impossible_is_refused_before_anything_is_spent() -> None:
    fleet = fleet_of(pool_main=variant(compute_s=1.0))
    decision = Placer(fleet).decide(ask(budget_s=0.5), NOW)
    assert isinstance(decision.refusal, DeadlineExceeded)
    assert "needs 600 ms of compute for this work, and 500 ms of the budget are left" in refused(decision)
    assert chosen(Placer(fleet).decide(ask(budget_s=0.7), NOW))[0] == "pool/main"


def test_a_prior_never_proves_that_a_request_is_hopeless() -> None:
    fleet = fleet_of(pool_main=variant(compute_s=None))
    assert chosen(Placer(fleet).decide(ask(budget_s=0.001, units=1e6), NOW))[0] == "pool/main"


def _the_first(candidates: Sequence[Candidate], budget_s: float) -> tuple[Candidate, str]:
    return candidates[0], "first"


def test_any_policy_chooses_among_those_that_are_left() -> None:
    placer = Placer(fleet_of(edge_a=variant(compute_s=0.5), pool_main=variant(compute_s=0.1)), _the_first)
    assert chosen(placer.decide(ask(), NOW)) == ("edge/a", "fp32", "first")
    assert chosen(placer.decide(ask(), NOW, exclude=["edge/a"])) == ("pool/main", "fp32", "only")


def test_the_best_other_is_on_another_target() -> None:
    fleet = fleet_of(edge_a=variant(), pool_main=variant(compute_s=0.2), pool_b=variant(compute_s=0.1))
    other = Placer(fleet).decide(ask(), NOW).best_other()
    assert other is not None
    assert other.target.id == "pool/b"

    two = fleet_of(edge_a=variant())
    two.fold(LinkLoad("edge/a", LoadReport(1, 1, 0, 0, 0.0), (offer(variant("int8"), variant("fp32")),)), NOW)
    decision = Placer(two).decide(ask(), NOW)
    assert len(decision.candidates) == 2
    assert decision.best_other() is None


@pytest.mark.parametrize(("budget_s", "chance"), [(0.30, 0.5), (0.40, 0.95), (0.20, 0.05), (9.0, 1.0)])
def test_a_margin_stands_for_a_chance(budget_s: float, chance: float) -> None:
    assert chance_from_margin(candidate(0.3, margin_s=0.1), budget_s) == pytest.approx(chance, abs=1e-3)


# hedging


def candidate(compute_s: float, *, margin_s: float = 0.0) -> Candidate:
    fleet = fleet_of(edge_a=variant(compute_s=compute_s))
    return estimate(fleet.offered("minilm", "1")[0], 1.0, NOW)._replace(finish_s=compute_s, margin_s=margin_s)


@pytest.mark.parametrize(
    ("primary", "alternative", "expected"),
    [
        (candidate(0.1), candidate(0.3), NOW + 0.7),  # the last instant at which the other can still make it
        (candidate(0.1), candidate(0.3, margin_s=0.1), NOW + 0.6),
        (candidate(0.5, margin_s=0.1), candidate(0.3, margin_s=0.3), NOW + 0.6),  # not before the first is overdue
        (candidate(0.8), candidate(0.3), None),  # too late by then
    ],
)
def test_the_fallback_is_launched_as_late_as_it_can_still_help(
    primary: Candidate, alternative: Candidate, expected: float | None
) -> None:
    assert fallback_at(NOW, NOW + 1.0, primary, alternative) == (expected and pytest.approx(expected))


@pytest.mark.parametrize(
    ("promised_at", "silent"), [(None, True), (NOW + 0.5, False), (NOW - 0.1, True), (NOW + 1.5, True)]
)
def test_a_promise_that_is_still_good_is_no_silence(promised_at: float | None, silent: bool) -> None:
    assert is_silent(promised_at, NOW, NOW + 1.0) is silent

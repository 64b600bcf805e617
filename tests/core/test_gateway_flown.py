"""What is remembered of requests: bounded, the chosen one always, and nothing that holds on to a request."""

from __future__ import annotations

import pytest

from gateway.core.flown import MOST_CANDIDATES, Memory, Note, remembered
from gateway.core.placement import Decision, Placer
from gateway.core.request import RequestMachine
from gateway.core.value import ValuePlacer
from tests.support.fleets import NOW, ask, fleet_of, variant


def crowd(count: int) -> dict[str, object]:
    return {f"edge_{number}": variant(compute_s=0.01 + 1e-5 * number) for number in range(count)}


@pytest.mark.parametrize("policy", [Placer, ValuePlacer])
def test_of_many_candidates_some_are_kept_and_the_chosen_one_always(policy: type[Placer]) -> None:
    fleet = fleet_of(**{**crowd(MOST_CANDIDATES + 40), "pool_main": variant(compute_s=0.001)})  # type: ignore[arg-type]
    decision = policy(fleet).decide(ask(budget_s=0.009), NOW)  # only the pool is likely to make it
    assert decision.chosen is not None and decision.chosen.target.id == "pool/main"

    kept = remembered(decision)

    assert kept is not None and kept.chosen is not None
    assert len(kept.candidates) <= MOST_CANDIDATES + 1
    assert kept.chosen.offered in [one.offered for one in kept.candidates]
    assert len(kept.judged) in (0, len(kept.candidates))


def test_a_small_decision_is_kept_as_it_is() -> None:
    decision = Placer(fleet_of(edge_a=variant())).decide(ask(), NOW)
    assert remembered(decision) is decision
    assert remembered(None) is None


def test_an_error_that_was_raised_is_not_kept_since_it_would_keep_the_request() -> None:
    decision = Placer(fleet_of(up=False, edge_a=variant())).decide(ask(), NOW)
    assert decision.refusal is not None
    kept = remembered(decision)
    assert kept == decision._replace(refusal=None)
    refused_among_many = Decision(NOW, ask(), (), None, "", decision.refusal)
    assert remembered(refused_among_many) == refused_among_many._replace(refusal=None)


def test_memory_keeps_the_last_ones_and_counts_all() -> None:
    memory = Memory(2)
    for number in range(3):
        machine = RequestMachine(ask(), Placer(fleet_of(edge_a=variant())))
        machine.arrived(NOW)
        memory.add(str(number), NOW, machine, [Note(NOW, "launched", 0)], "cancelled", 0.1)
    assert [(one.number, one.request_id, one.reasons) for one in memory] == [(2, "1", ("only",)), (3, "2", ("only",))]
    assert (len(memory), repr(memory)) == (2, "<Memory of 2 requests>")

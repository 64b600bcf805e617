"""What is remembered of requests: bounded by count and by bytes, found again, and nothing that holds on to anything."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from types import MappingProxyType

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from gateway.core.history.decision_record import MOST_CANDIDATES, MOST_PASSED, pack_decision
from gateway.core.history.query import RecordFilter, select_records
from gateway.core.history.recorder import (
    MAX_EVENTS_PER_REQUEST,
    FlightRecorder,
    RequestEvent,
    RequestRecord,
    pack_record,
    record_bytes,
    unpack_record,
)
from gateway.core.placement.placer import Decision, Placer
from gateway.core.placement.utility import UtilityPlacer
from gateway.operate.explanation import matching_records
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tests.support.gateway.flowns import answered, given, request_record, went


def crowd(count: int) -> dict[str, object]:
    return {f"edge_{number}": variant(compute_s=0.01 + 1e-5 * number) for number in range(count)}


@pytest.mark.parametrize("policy", [Placer, UtilityPlacer])
def test_of_many_candidates_some_are_kept_and_the_chosen_one_always(policy: type[Placer]) -> None:
    fleet = fleet_of(**{**crowd(MOST_CANDIDATES - 1), "pool_main": variant(compute_s=0.001)})  # type: ignore[arg-type]
    decision = policy(fleet).decide(ask(budget_s=0.009), NOW)  # only the pool is likely to make it
    assert decision.chosen is not None and decision.chosen.target.id == "pool/main"
    many = decision._replace(candidates=decision.candidates[:-1] * 3 + decision.candidates[-1:])
    many = many._replace(judged=tuple(decision.judged[:-1]) * 3 + tuple(decision.judged[-1:]))

    kept = pack_decision(many)

    assert kept is not None and kept.choice is not None
    assert len(kept.candidates) <= MOST_CANDIDATES
    assert kept.choice.target == "pool/main" and kept.choice in kept.candidates


@pytest.mark.parametrize("policy", [Placer, UtilityPlacer])
def test_a_decision_is_kept_with_every_number_it_was_made_on(policy: type[Placer]) -> None:
    decision = policy(fleet_of(edge_a=variant(), pool_main=variant())).decide(ask(), NOW)
    kept = pack_decision(decision)
    assert kept is not None and kept.choice is not None and decision.chosen is not None
    assert (kept.reason, kept.budget_s) == (decision.reason, 2.0)
    for place, (one, before) in enumerate(zip(kept.candidates, decision.candidates, strict=True)):
        assert (one.target, one.variant, one.cost) == (before.target.id, before.variant.name, before.cost)
        assert (one.compute_s, one.link_s, one.trust) == (before.compute_s, before.link_s, before.trust)
        assert one.price == pytest.approx(before.target.price)
        verdict = decision.judged[place] if decision.judged else None
        assert (one.judged == 1.0) == (verdict is not None)
        if verdict is not None:
            assert (one.chance, one.claimed, one.value) == (verdict.chance, verdict.claimed, verdict.value)
    assert kept.choice.finish_s == decision.chosen.finish_s
    assert kept.choice.finish_s < kept.choice.within_s == pytest.approx(kept.promised_s)
    assert pack_decision(None) is None


def test_who_was_no_candidate_is_kept_with_the_reason_of_then_up_to_a_number() -> None:
    small = {f"edge_small{number}": variant(max_batch=1) for number in range(MOST_PASSED + 5)}
    decision = Placer(fleet_of(edge_a=variant(), **small)).decide(ask(rows=4), NOW)
    kept = pack_decision(decision)
    assert kept is not None
    assert len(kept.passed_over) == MOST_PASSED
    assert {one.why_not for one in kept.passed_over} == {"takes at most 1 rows"}
    assert kept.more_passed_over == 5


def test_what_is_kept_holds_on_to_no_target_and_to_no_error() -> None:
    fleet = fleet_of(edge_a=variant())
    kept = pack_decision(Placer(fleet).decide(ask(), NOW))
    refused = pack_decision(Placer(fleet_of(up=False, edge_a=variant())).decide(ask(), NOW))
    assert kept is not None and refused is not None
    assert not {type(one).__name__ for one in gc.get_referents(*astuple(kept))} & {"TargetView", "Offered", "Candidate"}
    assert (refused.candidates, refused.choice) == ((), None)
    assert pack_decision(Decision(NOW, ask(), (), None, "", None)) is not None


def test_memory_keeps_the_last_ones_and_counts_all() -> None:
    memory = FlightRecorder(2, run="3fa09c")
    for number in range(3):
        memory.add(request_record(number=memory.next_number(), request_id=str(number)))
    assert [(one.number, one.request_id) for one in memory] == [(2, "1"), (3, "2")]
    assert memory.name_of(3) == "3fa09c-3"
    assert (len(memory), repr(memory).startswith("<FlightRecorder of 2 requests in 0.0 MiB>")) == (2, True)


def test_an_answer_without_stages_is_kept_as_a_foreign_server_gives_it() -> None:
    memory = FlightRecorder(20, 10_000)
    memory.add(request_record(notes=answered(0, "pool/main", 0.002, stages=MappingProxyType({}))))
    assert [note.stages for one in memory for note in one.notes if note.what == "answered"] == [{}]


@pytest.mark.slow
@for_all(st.lists(st.integers(0, 300), max_size=60), st.integers(0, 40_000))
def test_memory_never_holds_more_bytes_than_it_may(id_lengths: list[int], most_bytes: int) -> None:
    memory = FlightRecorder(20, most_bytes)
    one = request_record()
    for number, length in enumerate(id_lengths):
        memory.add(replace(one, number=number, request_id="x" * length))
        assert memory.held_bytes == sum(record_bytes(kept) for kept in memory) <= most_bytes
        assert len(memory) <= 20


@pytest.mark.parametrize("make", ["_alone", "_in_a_crowd", "_long_winded"])
def test_what_is_kept_comes_back_as_it_was(make: str) -> None:
    before = globals()[make]()
    after = unpack_record(pack_record(before))
    assert after == before
    assert before.decision is not None and after.decision is not None
    assert after.decision.choice == before.decision.choice
    ended = replace(before, end="unreachable: gone", decision=None, deadline=None, notes=())
    assert unpack_record(pack_record(ended)) == ended


def test_half_of_a_surrogate_pair_in_a_strangers_id_costs_nothing_but_itself() -> None:
    memory = FlightRecorder(2)
    memory.add(request_record(request_id="a\ud800b"))
    assert [one.request_id for one in memory] == ["a\\ud800b"]


def test_a_memory_of_nothing_remembers_nothing() -> None:
    memory = FlightRecorder(0)
    memory.add(request_record())
    assert list(memory) == []


def _alone() -> RequestRecord:
    return request_record()


def _in_a_crowd() -> RequestRecord:
    fleet = fleet_of(**crowd(30), edge_small=variant(max_batch=1), edge_least=variant(max_batch=1))  # type: ignore[arg-type]
    decision = pack_decision(Placer(fleet).decide(ask(rows=2), NOW))
    return replace(request_record(fleet=fleet), decision=decision)


def _long_winded() -> RequestRecord:
    notes = [one for turn in range(MAX_EVENTS_PER_REQUEST // 3) for one in answered(turn, f"edge/{turn}", 0.01 * turn)]
    return replace(request_record(notes=notes, end=given()), request_id="\U0001f600" * 256)


@pytest.mark.parametrize("make", [_alone, _in_a_crowd, _long_winded])
def test_no_request_takes_more_than_is_reckoned_for_it(make: Callable[[], RequestRecord]) -> None:
    one = make()  # whatever is made once is made
    count = 50
    memory = FlightRecorder(count)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(count):
            memory.add(one)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    taken = after - before
    assert taken <= count * record_bytes(one) + 4096, "and what the interpreter allocates meanwhile for itself"
    assert count * record_bytes(one) <= 2 * taken, "and it is not reckoned as far too much either"


def test_requests_are_found_by_their_callers_id_the_answered_one_their_trace_and_their_number() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    kept = [
        request_record(number=1, request_id="a"),
        request_record(number=2, request_id="7", trace_id=trace),
        request_record(number=7),
    ]
    for asked in ("#2", "2", "3fa09c-2", trace, trace.upper()):
        assert [one.number for one in matching_records(kept, asked, "3fa09c")] == [2]
    assert [one.number for one in matching_records(kept, "7", "3fa09c")] == [2, 7]
    assert matching_records(kept, "000000-2", "3fa09c") == []
    assert matching_records(kept, "") == [] or all(one.request_id == "" for one in matching_records(kept, ""))


def test_late_failed_and_hedged_ones_are_found_and_the_slowest_first() -> None:
    well = request_record(number=1, elapsed_s=0.3)
    late = request_record(number=2, elapsed_s=1.2, tenant="acme")
    failed = request_record(number=3, end="overloaded: full", elapsed_s=0.01)
    left = request_record(number=4, end="cancelled: the caller left", elapsed_s=0.02)
    beside = [*went(0, "edge/a", 0.002), *answered(1, "pool/main", 0.2)]
    hedged = request_record(
        number=5, notes=beside, end=given("pool/main", 1, hedged=True), reasons=("cheapest", "hedge")
    )
    well, late, failed, left = (replace(one, reasons=("cheapest",)) for one in (well, late, failed, left))
    newest_first = [hedged, left, failed, late, well]

    def numbers(sought: RecordFilter, most: int = 10, skip: int = 0) -> list[int]:
        return [one.number for one in select_records(newest_first, sought, most, skip)]

    assert numbers(RecordFilter(late=True)) == [3, 2]
    assert numbers(RecordFilter(failed=True)) == [4, 3]
    assert numbers(RecordFilter(hedged=True)) == [5]
    assert numbers(RecordFilter(slowest=True), 2) == [2, 1]
    assert numbers(RecordFilter(target="pool/main")) == [5]
    assert numbers(RecordFilter(tenant="acme")) == [2]
    assert numbers(RecordFilter(model="other")) == []
    assert numbers(RecordFilter(), 3) == [5, 4, 3]
    assert numbers(RecordFilter(), 3, 3) == [2, 1]
    assert numbers(RecordFilter(), 3, 9) == []
    assert numbers(RecordFilter(slowest=True), 2, 1) == [1, 5]
    assert numbers(RecordFilter(late=True), 1, 1) == [2]
    assert [one.outcome for one in newest_first] == ["ok", "cancelled", "overloaded", "late", "ok"]


def test_a_note_is_words_and_numbers() -> None:
    assert astuple(RequestEvent(NOW, "look", 0)) == (NOW, "look", 0, "", "", 0.0, None, "", None, 0)

"""Which models are in memory: by what their absence costs, with requests that wait and requests that cannot."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_pool.core.memory.residency import HALF_LIFE_S, ColdStart, Residency
from simulator.model_churn import ByValue, ChurnLoad, LeastRecentlyUsed, run_churn


def residency(*names: str, room: int = 2, cold_s: float = 1.0) -> Residency:
    found = Residency(most_models=room)
    for name in names:
        found.know(name, size_bytes=100.0, cold_s=cold_s)
    return found


def bring(core: Residency, name: str, now: float) -> None:
    core.loading(name, now)
    core.loaded(name, now)


def test_a_request_waits_for_a_model_that_comes_in_within_its_budget_and_else_goes_elsewhere() -> None:
    core = residency("a")
    assert core.ask("a", 0.5, 0.0) == ColdStart("elsewhere", 1.0)
    assert core.ask("a", 5.0, 0.0) == ColdStart("wait", 1.0)
    assert core.next_in(0.0) == ("a", ())
    core.loading("a", 0.0)
    assert core.ask("a", 5.0, 0.75) == ColdStart("wait", 0.25)
    core.loaded("a", 1.0, took_s=1.0)
    assert core.ask("a", 0.1, 1.0) == ColdStart("here")
    assert core.next_in(1.0) is None
    assert repr(core) == "<Residency 1 of 1 in memory, 0 waited for>"


def test_one_comes_in_at_a_time_and_the_others_wait_for_it_too() -> None:
    core = residency("a", "b")
    core.ask("a", 9.0, 0.0)
    core.loading("a", 0.0)
    assert core.ask("b", 9.0, 0.5) == ColdStart("wait", 1.5)
    assert core.next_in(0.5) is None
    core.loaded("a", 1.0)
    assert core.next_in(1.0) == ("b", ())


def test_a_load_that_takes_longer_than_expected_is_taken_as_half_way() -> None:
    core = residency("a")
    core.loading("a", 0.0)
    assert core.wait_s("a", 3.0) == 3.0


def test_the_model_that_is_asked_for_least_goes_out_and_not_the_one_that_was_asked_for_longest_ago() -> None:
    core = residency("often", "seldom", "new")
    bring(core, "often", 0.0)
    bring(core, "seldom", 0.0)
    for _ in range(9):
        core.ask("often", 0.1, 1.0)
    core.ask("seldom", 0.1, 2.0)
    core.ask("new", 60.0, 3.0)
    assert core.next_in(3.0) == ("new", ("seldom",))


def test_a_request_for_a_rare_model_that_cannot_wait_throws_nothing_out() -> None:
    core = residency("often", "new", room=1)
    bring(core, "often", 0.0)
    for _ in range(20):
        core.ask("often", 0.1, 1.0)
    assert core.ask("new", 0.1, 2.0).verdict == "elsewhere"
    assert core.next_in(2.0) is None
    for _ in range(40):  # it is not rare any more
        core.ask("new", 0.1, 3.0)
    assert core.next_in(3.0) == ("new", ("often",))
    assert core.turned_away == 41


def test_what_is_pinned_comes_in_by_itself_and_never_goes() -> None:
    core = residency("a", room=1)
    core.know("kept", size_bytes=100.0, cold_s=1.0, pinned=True)
    assert core.next_in(0.0) == ("kept", ())
    bring(core, "kept", 0.0)
    assert core.ask("a", 60.0, 1.0).verdict == "elsewhere"
    assert core.next_in(1.0) is None


def test_old_demand_is_worth_half_after_its_half_life() -> None:
    core = residency("a")
    core.ask("a", 0.1, 0.0)
    one = core["a"]
    assert one.demand(HALF_LIFE_S) == pytest.approx(one.demand(0.0) / 2)


def test_only_as_much_goes_out_as_is_needed() -> None:
    core = Residency(most_bytes=1000.0)
    for name, size_bytes in (("small", 100.0), ("large", 800.0), ("new", 700.0)):
        core.know(name, size_bytes=size_bytes, cold_s=1.0)
    bring(core, "small", 0.0)
    bring(core, "large", 0.0)
    core.ask("new", 60.0, 1.0)
    assert core.next_in(1.0) == ("new", ("large",))
    assert core.fits(100.0) and not core.fits(101.0)


def test_a_model_that_failed_to_load_is_not_tried_again_until_it_is_asked_for() -> None:
    core = residency("a")
    core.ask("a", 60.0, 0.0)
    core.loading("a", 0.0)
    core.failed("a")
    assert core.next_in(0.0) is None
    core.ask("a", 60.0, 1.0)
    assert core.next_in(1.0) == ("a", ())


def test_a_model_that_is_forgotten_while_it_comes_in_makes_way_for_others() -> None:
    core = residency("a", "b")
    core.ask("b", 60.0, 0.0)
    core.loading("a", 0.0)
    core.forget("a")
    assert "a" not in core
    core.ended()
    assert core.next_in(0.0) == ("b", ())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.floats(0.05, 30.0), st.floats(0.0, 3.0)),
        min_size=1, max_size=120,
    ),
    st.integers(1, 5),
)  # fmt: skip
def test_never_is_more_in_memory_than_may_be_and_never_does_a_pinned_model_go(
    asked: list[tuple[int, float, float]], room: int
) -> None:
    core = Residency(most_bytes=room * 100.0, most_models=room)
    for number in range(10):
        core.know(f"m{number}", size_bytes=40.0 + 6.0 * number, cold_s=0.5, pinned=number == 0)
    now = 0.0
    for number, budget_s, gap_s in asked:
        now += gap_s
        core.ask(f"m{number}", budget_s, now)
        while (found := core.next_in(now)) is not None:
            name, victims = found
            assert "m0" not in victims and name not in victims
            for victim in victims:
                core.evicted(victim)
            core.loading(name, now)
            core.loaded(name, now)
            resident = [one for one in core if one.resident]
            assert len(resident) <= room and sum(one.size_bytes for one in resident) <= room * 100.0
    assert all(one.worth(now) < inf for one in core)


@pytest.mark.slow
def test_it_misses_fewer_deadlines_than_least_recently_used() -> None:
    load = ChurnLoad(models=30, room_models=5.0, rate_per_s=5.0, duration_s=240.0, shift_s=120.0)
    models, requests = load.made(1)
    room_bytes = load.room_models * sum(one.size_bytes for one in models) / len(models)
    ours = run_churn(models, requests, ByValue(models, room_bytes), seed=1)
    plain = run_churn(models, requests, LeastRecentlyUsed(models, room_bytes), seed=1)
    assert ours.asked == plain.asked
    assert ours.missed <= 2 / 3 * plain.missed


def test_a_load_of_a_model_that_was_forgotten_takes_its_time_and_counts_for_none_that_has_its_name_now() -> None:
    core = residency("a", "b")
    core.loading("a", 0.0)
    core.forget("a")
    core.know("a", size_bytes=100.0, cold_s=3.0)
    assert core.wait_s("a", 0.5) == 0.5 + 3.0
    assert core.ask("b", 9.0, 0.5) == ColdStart("wait", 1.5)
    assert core.next_in(0.5) is None
    core.ended()
    assert core.next_in(1.0) == ("b", ())


def test_room_is_found_for_one_that_must_come_in_where_anything_may_go_out() -> None:
    core = residency("asked", "fresh", room=1)
    bring(core, "asked", 0.0)
    for _ in range(9):
        core.ask("asked", 9.0, 0.0)
    assert core.room_for("fresh", 0.0) == ("asked",)
    core.know("asked", size_bytes=100.0, cold_s=1.0, pinned=True)
    assert core.room_for("fresh", 0.0) is None

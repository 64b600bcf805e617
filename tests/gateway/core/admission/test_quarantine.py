"""Who sent poison three times within a minute is refused for the next; nobody else is, however broken a target is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission.quarantine import FOR_S, MOST, TIMES, WINDOW_S, Quarantine, Suspect


def blame(held: Quarantine, suspect: Suspect, *instants: float, target: str = "pool/a") -> list[bool]:
    """Blames by a target that answers somebody else after each."""
    begins = []
    for now in instants:
        begins.append(held.blamed(suspect, target, now))
        held.answered(target)
    return begins


@pytest.mark.parametrize("suspect", ["acme", 4711])
def test_the_third_poison_within_a_minute_begins_a_quarantine(suspect: Suspect) -> None:
    held = Quarantine()
    assert not held
    assert blame(held, suspect, 1.0, 2.0, 3.0) == [False, False, True]
    assert held and held.begun == 1
    assert held.left_s(suspect, 4.0) == pytest.approx(FOR_S - 1.0)
    assert held.left_s("somebody else", 4.0) == 0.0
    assert repr(held) == "<Quarantine 1 suspects, 1 begun, 0 targets in doubt>"


def test_a_quarantine_ends_by_itself_and_does_not_begin_anew_with_the_next_poison() -> None:
    held = Quarantine()
    blame(held, "acme", 1.0, 2.0, 3.0)
    assert held.left_s("acme", 3.0 + FOR_S) == 0.0
    assert blame(held, "acme", 4.0 + FOR_S) == [False]
    assert held.left_s("acme", 4.0 + FOR_S) == 0.0


def test_poisons_far_apart_are_bad_luck() -> None:
    held = Quarantine()
    assert not any(blame(held, "acme", 0.0, 0.6 * WINDOW_S, 1.2 * WINDOW_S, 1.8 * WINDOW_S))


def test_a_poison_that_was_under_way_when_the_quarantine_began_prolongs_it_and_is_not_told_again() -> None:
    held = Quarantine()
    assert blame(held, "acme", 1.0, 2.0, 3.0, 4.0) == [False, False, True, False]
    assert held.left_s("acme", 4.0) == FOR_S


def test_a_target_that_fails_whoever_comes_has_nobody_refused() -> None:
    held = Quarantine()
    held.answered("pool/a")
    for now in range(50):
        assert not held.blamed("acme", "pool/a", float(now))
    assert held.left_s("acme", 50.0) == 0.0


def test_several_pools_that_work_for_others_are_believed_together() -> None:
    held = Quarantine()
    assert [held.blamed("acme", target, 1.0) for target in ("pool/a", "pool/b", "pool/c")] == [False, False, True]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=60))
def test_memory_is_bounded_whoever_is_blamed_by_whom(said: list[tuple[int, int]]) -> None:
    held = Quarantine()
    for place in range(MOST - 5):
        held.blamed(place, f"edge/{place}", 0.0)
    for suspect, target in said:
        held.blamed(suspect, f"edge/{target}", 1.0)
        assert len(held.suspects) <= MOST
        assert len(held.doubted) <= MOST


def test_beyond_the_bound_the_longest_unblamed_are_forgotten() -> None:
    held = Quarantine()
    blame(held, "first", 0.0)
    for place in range(2 * MOST):
        blame(held, place, 1.0)
    assert "first" not in held.suspects and 2 * MOST - 1 in held.suspects


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 100.0))))
def test_nobody_is_refused_for_fewer_than_three(said: list[tuple[str, float]]) -> None:
    held = Quarantine()
    for suspect, now in sorted(said, key=lambda one: one[1]):
        blame(held, suspect, now)
    for suspect in "ab":
        if sum(one == suspect for one, _ in said) < TIMES:
            assert held.left_s(suspect, 100.0) == 0.0

"""Who may come in by a stream of its own, decided from its hello."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.access.dial_in import GREETINGS, WITHIN_S, DialInAdmission


def why_not(
    reception: DialInAdmission, name: str, epoch: int = 1, *, proven: str = "", known: bool = True, now: float = 0.0
) -> str:
    refused = reception.why_not_named(name, proven=proven, known=known, now=now)
    return refused or reception.why_not_now(name, epoch)


@pytest.mark.parametrize("name", ["", "edge/", "pool/a", "gateway/main", "edge/a/b", "edge/#", "edge/" + "a" * 65, "a"])
def test_only_devices_come_in(name: str) -> None:
    assert "only devices dial here" in why_not(DialInAdmission(8), name)


def test_who_shows_a_credential_is_its_owner_and_nobody_else() -> None:
    reception = DialInAdmission(8)

    assert why_not(reception, "edge/a", proven="edge/a", known=False) == ""
    assert "shows the credential of edge/b" in why_not(reception, "edge/a", proven="edge/b")


def test_without_a_proof_only_devices_that_the_fleet_knows_come_in() -> None:
    assert why_not(DialInAdmission(8), "edge/a", known=True) == ""
    assert "not known to this fleet" in why_not(DialInAdmission(8), "edge/a", known=False)


def test_of_two_sessions_the_newer_has_the_name_and_of_two_streams_in_one_the_later() -> None:
    reception = DialInAdmission(8)
    reception.enter("edge/a", 5)

    assert "a newer session of edge/a is here" in why_not(reception, "edge/a", 4)
    assert why_not(reception, "edge/a", 5) == ""
    assert why_not(reception, "edge/a", 6) == ""

    reception.leave("edge/a")
    assert why_not(reception, "edge/a", 4) == "", "nobody is there whose session could be newer"


def test_a_name_that_is_greeted_too_often_has_to_wait_and_others_do_not() -> None:
    reception = DialInAdmission(8)
    assert [why_not(reception, "edge/a") for _ in range(GREETINGS)] == [""] * GREETINGS

    assert "within" in why_not(reception, "edge/a", now=WITHIN_S - 0.1)
    assert why_not(reception, "edge/b", now=WITHIN_S - 0.1) == ""
    assert why_not(reception, "edge/a", now=WITHIN_S) == ""


def test_when_it_is_full_newcomers_are_refused_and_those_who_are_in_may_dial_again() -> None:
    reception = DialInAdmission(2)
    reception.enter("edge/a", 1)
    reception.enter("edge/b", 1)

    assert "max_dialled_in" in why_not(reception, "edge/c")
    assert why_not(reception, "edge/a", 2) == ""


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4), st.booleans()), max_size=60))
def test_there_is_one_stream_a_name_at_most_and_never_an_older_session(steps: list[tuple[str, int, bool]]) -> None:
    reception, inside = DialInAdmission(3), dict[str, int]()
    for now, (name, epoch, leaves) in enumerate(steps):
        if leaves:
            reception.leave(f"edge/{name}")
            inside.pop(name, None)
        elif not why_not(reception, f"edge/{name}", epoch, now=now * WITHIN_S):
            assert epoch >= inside.get(name, 0)
            reception.enter(f"edge/{name}", epoch)
            inside[name] = epoch
        assert len(inside) <= 3

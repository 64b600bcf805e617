"""Two live agents of one name are noticed, one of them keeps the name, and a restart is neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.core.fleet.name_claims import HOLD_S, MOST_NAMES, MOST_STARTS, SETTLE_S, NameClaim, NameClaims
from gateway.targets.condition_log import log_name_conflict
from tidegate.fleet.name_conflict import MOST_WORDS, is_name_taken


def old(epoch: int = 1) -> NameClaim:
    return NameClaim("boot-old", epoch, "10.0.0.1:9001", started_at=-1000.0)


def new(epoch: int = 2) -> NameClaim:
    return NameClaim("boot-new", epoch, "10.0.0.2:9001", started_at=0.0)


def in_conflict() -> NameClaims:
    claims = NameClaims()
    assert claims.claim("kiosk", old(1), 0.0) is None
    assert claims.claim("kiosk", new(2), 1.0) is None
    assert claims.claim("kiosk", old(3), 2.0) is None
    return claims


def test_a_restart_and_a_reconnect_are_no_conflict() -> None:
    claims = NameClaims()
    for at, claim in enumerate((old(1), old(2), new(3), new(4), new(5))):
        assert claims.claim("kiosk", claim, float(at)) is None
    assert claims.standing(9.0) == []


def test_an_agent_that_comes_back_after_another_is_a_conflict_and_the_longer_running_one_is_kept() -> None:
    claims = in_conflict()

    (conflict,) = claims.standing(2.0)
    assert (conflict.kept.boot, conflict.refused.boot) == ("boot-old", "boot-new")
    assert "10.0.0.1:9001, epoch 3, started 1002 s ago" in conflict.evidence(2.0)
    assert "10.0.0.2:9001, epoch 2, started 2 s ago" in conflict.evidence(2.0)
    refused = claims.claim("kiosk", new(4), 3.0)
    assert refused is conflict and is_name_taken(refused.refusal(3.0)) and "10.0.0.1" in refused.refusal(3.0)
    assert claims.keeps("kiosk", "boot-old") and not claims.keeps("kiosk", "boot-new")
    assert claims.refused_by("kiosk", 4) is conflict and claims.refused_by("kiosk", 3) is None
    claims.claim("kiosk", old(4), 3.5)
    assert claims.refused_by("kiosk", 4) is None, "both have it: who speaks is not known"


def test_the_shorter_running_one_is_refused_also_where_it_is_the_one_that_came_back() -> None:
    claims = NameClaims()
    claims.claim("kiosk", new(1), 0.0)
    claims.claim("kiosk", old(2), 1.0)

    assert claims.claim("kiosk", new(3), 2.0) is not None
    assert claims.claim("kiosk", old(4), 2.5) is None
    assert claims.claim("kiosk", new(5), 40.0) is not None


def test_each_later_attempt_is_refused_for_as_long_as_the_other_takes_the_name_back() -> None:
    claims = in_conflict()
    for attempt in range(1, 6):
        assert claims.claim("kiosk", new(10 * attempt), 60.0 * attempt) is not None
        assert claims.claim("kiosk", old(10 * attempt + 1), 60.0 * attempt + 0.5) is None
    assert len(claims.standing(400.0)) == 1


def test_an_agent_whose_stream_stands_need_not_claim_again() -> None:
    claims = in_conflict()
    for attempt in range(1, 6):
        claims.still_here("kiosk", "boot-old", 60.0 * attempt)
        assert claims.claim("kiosk", new(2), 60.0 * attempt + 0.1) is not None


def test_where_the_kept_one_is_gone_the_other_gets_the_name_and_the_conflict_is_over() -> None:
    claims = in_conflict()
    changes: list[bool] = []
    claims.on_change = lambda _conflict, begun, _now: changes.append(begun)

    assert claims.claim("kiosk", new(4), 30.0) is not None, "the other one has claimed since"
    assert claims.claim("kiosk", new(4), 30.0 + SETTLE_S / 2) is not None, "the same session, said twice"
    assert claims.claim("kiosk", new(5), 90.0) is None
    assert claims.standing(90.0) == [] and changes == [False]


def test_a_conflict_whose_refused_agent_is_heard_of_no_more_ends() -> None:
    claims = in_conflict()
    assert len(claims.standing(HOLD_S)) == 1
    assert claims.standing(3.0 + HOLD_S) == []


def test_what_a_broker_kept_is_no_claim() -> None:
    claims = NameClaims()
    claims.remembered("kiosk", old(1))
    assert claims.claim("kiosk", new(2), 1.0) is None
    claims.remembered("kiosk", old(1))
    assert claims.claim("kiosk", new(3), 2.0) is None
    assert claims.claim("kiosk", old(4), 3.0) is None, "it lives, and has run longer"
    assert claims.claim("kiosk", new(5), 4.0) is not None


def test_an_agent_that_names_no_start_is_never_refused() -> None:
    claims = NameClaims()
    for epoch in range(1, 9):
        assert claims.claim("kiosk", NameClaim("", epoch, f"10.0.0.{epoch % 2}:1", 0.0), float(epoch)) is None


def test_begin_and_end_are_logged_with_both_sides() -> None:
    claims = NameClaims()
    claims.on_change = log_name_conflict
    with capture_logs() as lines:
        for at, claim in enumerate((old(1), new(2), old(3))):
            claims.claim("kiosk", claim, float(at))
        claims.standing(10.0 + HOLD_S)
    begun, ended = lines
    assert begun["log_level"] == "warning" and begun["device"] == "kiosk"
    assert "10.0.0.1:9001, epoch 3" in begun["kept"] and "10.0.0.2:9001, epoch 2" in begun["refused"]
    assert ended["log_level"] == "info"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcdefghijkl")), max_size=200))
def test_at_most_one_of_two_is_refused_and_the_memory_is_bounded(said: list[tuple[int, str]]) -> None:
    claims = NameClaims()
    for at, (device, boot) in enumerate(said):
        claim = NameClaim(boot, at + 1, "x" * 500, started_at=-float(ord(boot)))
        refused = claims.claim(str(device), claim, float(at))
        assert refused is None or (refused.kept.started_at < claim.started_at and not claims.keeps(str(device), boot))
        assert refused is None or len(refused.refusal(float(at))) <= MOST_WORDS


@pytest.mark.slow
def test_the_memory_is_bounded_in_starts_and_in_names() -> None:
    claims = NameClaims()
    claims.claim("kiosk", old(1), 0.0)
    for start in range(MOST_STARTS):
        claims.claim("kiosk", NameClaim(f"boot-{start}", start + 2, "", float(start)), 1.0 + start)
    assert claims.claim("kiosk", old(99), 50.0) is None and claims.standing(50.0) == [], "it was forgotten"

    claims = in_conflict()
    for name in range(MOST_NAMES):
        claims.claim(f"other-{name}", old(), 3.0)
    assert repr(claims) == f"<NameClaims of {MOST_NAMES} names, 0 conflicts>"

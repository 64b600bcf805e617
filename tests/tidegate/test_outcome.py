"""Each error names whose fault it is, and survives a trip through its code."""

from __future__ import annotations

import pytest

from tidegate.outcome import (
    ERRORS,
    BadAnswer,
    CallerError,
    CapacityError,
    InvalidRequest,
    Outcome,
    Overloaded,
    PeerError,
    ServeError,
    error_from_code,
)


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_rebuilt_from_its_code(error: type[ServeError]) -> None:
    rebuilt = error_from_code(error.code, "why", retry_after_s=0.5)
    assert type(rebuilt) is error
    assert (rebuilt.message, str(rebuilt), rebuilt.retry_after_s) == ("why", "why", 0.5)


def test_codes_are_unique_and_each_is_an_outcome() -> None:
    assert len({error.code for error in ERRORS}) == len(ERRORS)
    assert {Outcome(error.code) for error in ERRORS} <= set(Outcome)


def test_an_unknown_code_is_a_bad_answer_of_the_peer() -> None:
    assert type(error_from_code("from_the_future", "x")) is BadAnswer


def test_a_callers_fault_is_never_tried_elsewhere_and_a_peers_always() -> None:
    assert not any(error.retry_elsewhere for error in ERRORS if issubclass(error, CallerError))
    assert all(error.retry_elsewhere for error in ERRORS if issubclass(error, PeerError))
    assert [error.code for error in ERRORS if issubclass(error, CapacityError) and error.retry_elsewhere] == [
        "overloaded"
    ]


def test_the_outcome_of_an_exception_that_is_not_ours_is_internal() -> None:
    assert Outcome.of(Overloaded("full")) is Outcome.OVERLOADED
    assert Outcome.of(KeyError("x")) is Outcome.INTERNAL
    assert repr(InvalidRequest("bad shape")) == "<InvalidRequest 'bad shape'>"


def test_an_error_without_frames_is_the_same_error_and_holds_none_that_it_passed() -> None:
    try:
        try:
            raise KeyError("of a peer")
        except KeyError as cause:
            raise Overloaded("full", retry_after_s=2.0) from cause
    except Overloaded as error:
        kept = error.without_frames()
        assert kept is error
    assert (kept.message, kept.retry_after_s) == ("full", 2.0)
    assert (kept.__traceback__, kept.__cause__, kept.__context__) == (None, None, None)

"""Every class of error through each protocol's numbers and back."""

from __future__ import annotations

import grpc
import pytest

from tidegate.oip.status import (
    error_from_grpc,
    error_headers,
    error_metadata,
    grpc_status,
    http_status,
    message_of,
)
from tidegate.outcome import (
    ERRORS,
    BadAnswer,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NothingAlive,
    NotSupported,
    Overloaded,
    ServeError,
    TooLarge,
    Unreachable,
)

WANTED = {
    "invalid_request": (400, "INVALID_ARGUMENT"),
    "too_large": (413, "RESOURCE_EXHAUSTED"),
    "model_not_found": (404, "NOT_FOUND"),
    "not_supported": (501, "UNIMPLEMENTED"),
    "unauthenticated": (401, "UNAUTHENTICATED"),
    "forbidden": (403, "PERMISSION_DENIED"),
    "overloaded": (429, "RESOURCE_EXHAUSTED"),
    "deadline_exceeded": (504, "DEADLINE_EXCEEDED"),
    "nothing_alive": (503, "UNAVAILABLE"),
    "deferred": (202, "FAILED_PRECONDITION"),
    "unreachable": (502, "UNAVAILABLE"),
    "bad_answer": (502, "INTERNAL"),
    "internal": (500, "INTERNAL"),
    "poisonous": (500, "INTERNAL"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_every_class_has_its_numbers(kind: type[ServeError]) -> None:
    assert (http_status(kind("x")), grpc_status(kind("x"))) == WANTED[kind.code]
    assert grpc_status(kind("x")) in grpc.StatusCode.__members__


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("wait_s", [None, 0.25])
def test_every_class_crosses_grpc_and_is_the_same_class_again(kind: type[ServeError], wait_s: float | None) -> None:
    error = kind("why", retry_after_s=wait_s)
    back = error_from_grpc(grpc_status(error), message_of(error), dict(error_metadata(error)))
    assert (type(back), back.message, back.retry_after_s) == (kind, "why", wait_s)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("OUT_OF_RANGE", InvalidRequest),
        ("NOT_FOUND", ModelNotFound),
        ("UNIMPLEMENTED", NotSupported),
        ("RESOURCE_EXHAUSTED", Overloaded),
        ("DEADLINE_EXCEEDED", DeadlineExceeded),
        ("UNAVAILABLE", Unreachable),
        ("DATA_LOSS", BadAnswer),
        ("UNKNOWN", BadAnswer),
    ],
)
def test_a_foreign_server_is_read_by_its_status_alone(status: str, kind: type[ServeError]) -> None:
    assert type(error_from_grpc(status, "x", {})) is kind


def test_an_unknown_code_is_a_bad_answer() -> None:
    assert type(error_from_grpc("INTERNAL", "x", {"tidegate-code": "from-the-future"})) is BadAnswer


@pytest.mark.parametrize(
    ("text", "wait_s"), [("20", 0.02), ("-1", None), ("nan", None), ("inf", None), ("soon", None), ("", None)]
)
def test_a_wait_is_believed_only_where_it_is_one(text: str, wait_s: float | None) -> None:
    assert error_from_grpc("UNAVAILABLE", "x", {"grpc-retry-pushback-ms": text}).retry_after_s == wait_s


def test_a_refinement_of_a_class_keeps_its_numbers() -> None:
    class WrongName(InvalidRequest):
        pass

    assert (http_status(WrongName("x")), grpc_status(WrongName("x"))) == (400, "INVALID_ARGUMENT")


def test_what_is_no_error_of_ours_is_internal_and_tells_nothing_of_its_inside() -> None:
    error = RuntimeError("password=hunter2")
    assert (http_status(error), grpc_status(error), message_of(error)) == (500, "INTERNAL", "internal error")


def test_a_shed_request_says_when_to_come_back() -> None:
    headers = error_headers(Overloaded("full", retry_after_s=0.0201))
    assert headers == {"tidegate-refused": "overloaded", "retry-after-ms": "21", "retry-after": "1"}


def test_a_late_request_says_that_a_retry_is_pointless() -> None:
    assert error_headers(DeadlineExceeded("late"))["x-should-retry"] == "false"


@pytest.mark.parametrize(("error", "pushback"), [
    (NothingAlive("none"), "-1"),
    (NothingAlive("none", retry_after_s=0.5), "500"),
    (Overloaded("full", retry_after_s=0.02), "20"),
    (Unreachable("gone"), None),
    (InvalidRequest("bad"), None),
])  # fmt: skip
def test_grpc_clients_are_held_back_where_an_instant_retry_finds_the_same(
    error: ServeError, pushback: str | None
) -> None:
    assert dict(error_metadata(error)).get("grpc-retry-pushback-ms") == pushback


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0])
def test_a_wait_that_is_none_is_never_told(wait_s: float) -> None:
    assert "retry-after-ms" not in error_headers(Overloaded("full", retry_after_s=wait_s))


def test_a_message_fits_into_trailing_metadata() -> None:
    told = message_of(TooLarge("x" * 100_000))
    assert len(told) == 1000
    assert told.endswith("…")

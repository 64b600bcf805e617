"""The `Call` that the host gets for the headers and parameters of a request."""

from __future__ import annotations

import pytest

from tests.support.serving.host import minilm
from tidegate.arrays import array_to_tensor
from tidegate.models.example import example_arrays
from tidegate.oip.budget import MAX_BUDGET_S
from tidegate.oip.call import call_of, kept_headers
from tidegate.types import Datatype, InferRequest

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def request() -> InferRequest:
    manifest = minilm()
    arrays = example_arrays(manifest, {"batch": 1, "sequence": 4})
    return InferRequest("minilm", tuple(array_to_tensor(name, array, Datatype.INT64) for name, array in arrays.items()))


@pytest.mark.parametrize("headers", [{}, {"tidegate-budget-ms": "1e14"}])
def test_a_transports_deadline_of_years_counts_as_a_week(headers: dict[str, str]) -> None:
    call = call_of(request(), minilm(), protocol="oip-grpc", headers=headers, arrived_at=5.0, remaining_s=1e9)

    assert call.deadline == 5.0 + MAX_BUDGET_S


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (TRACE, True), (TRACE + "-of-a-later-version", True), ("zzz", False), ("", False), (TRACE.upper(), False),
        (TRACE + "-\udcff", False), (TRACE + "-é", False),
    ],
)  # fmt: skip
def test_a_traceparent_that_is_none_is_dropped(value: str, kept: bool) -> None:
    assert ("traceparent" in kept_headers([("Traceparent", value)])) is kept


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("congo=t61rcWkgMzE,rojo=00f067aa", True),
        ("a=1, b=2", True),
        ("a=\udcff", False),
        ("a=é", False),
        ("a=\t1", False),
    ],
)
def test_a_tracestate_that_no_hop_could_carry_is_dropped(value: str, kept: bool) -> None:
    assert ("tracestate" in kept_headers([("Tracestate", value)])) is kept


def test_only_headers_that_a_layer_may_need_are_kept() -> None:
    said = [("Tidegate-Budget-Ms", "5"), ("Authorization", "Bearer x"), ("Cookie", "no"), ("tidegate-budget-ms", "7")]

    assert kept_headers(said) == {"tidegate-budget-ms": "7"}

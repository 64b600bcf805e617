"""Budget, priority and demanded variant, from headers and parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.oip.budget import MAX_BUDGET_S, MAX_PRIORITY, budget_s, priority_of
from tidegate.outcome import InvalidRequest
from tidegate.types import Parameter


def test_a_caller_that_said_nothing_has_no_budget() -> None:
    assert budget_s({}, {}) is None


@pytest.mark.parametrize(("headers", "parameters", "remaining_s", "wanted"), [
    ({"tidegate-budget-ms": "250"}, {}, None, 0.25),
    ({"tidegate-budget-ms": " 1.5e3 "}, {}, None, 1.5),
    ({"tidegate-budget-ms": ".5"}, {}, None, 0.0005),
    ({}, {"timeout": 500_000}, None, 0.5),
    ({}, {"timeout": 0}, None, None),
    ({"tidegate-budget-ms": "250"}, {"timeout": 0}, 0.4, 0.25),
    ({}, {}, 0.4983, 0.4983),
    ({"x-stainless-read-timeout": "0.75"}, {}, None, 0.75),
    ({"x-stainless-read-timeout": "600"}, {}, None, None),
    ({"x-stainless-read-timeout": "600.0"}, {}, 9.0, 9.0),
    ({"tidegate-budget-ms": "900", "x-stainless-read-timeout": "0.75"}, {"timeout": 800_000}, 0.8, 0.75),
    ({"tidegate-budget-ms": "700", "x-stainless-read-timeout": "600"}, {"timeout": 800_000}, None, 0.7),
    ({"tidegate-budget-ms": "900"}, {"timeout": 600_000}, 0.7, 0.6),
    ({"tidegate-budget-ms": "900"}, {}, -0.1, -0.1),
    ({}, {"timeout": 2**64 - 1}, None, MAX_BUDGET_S),
    ({"tidegate-budget-ms": "1e99"}, {}, None, MAX_BUDGET_S),
])  # fmt: skip
def test_the_least_of_all_budgets_counts(
    headers: dict[str, str], parameters: dict[str, Parameter], remaining_s: float | None, wanted: float | None
) -> None:
    assert budget_s(headers, parameters, remaining_s) == (None if wanted is None else pytest.approx(wanted))


BAD_NUMBERS = [
    "nan",
    "NaN",
    "inf",
    "-inf",
    "soon",
    "",
    " ",
    "0",
    "0.0",
    "-5",
    "-0",
    "1_000",
    "0x10",
    "1e999",
    "٣",
    "5 ms",
]


@pytest.mark.parametrize("name", ["tidegate-budget-ms", "x-stainless-read-timeout"])
@pytest.mark.parametrize("text", BAD_NUMBERS)
def test_a_header_that_is_no_budget_is_refused_with_its_name_and_value(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        budget_s({name: text}, {})
    assert name in refused.value.message
    assert repr(text) in refused.value.message


@pytest.mark.parametrize("value", [-1, True, False, 0.0, 1.5, float("nan"), "500", "nan"])
def test_a_timeout_that_is_no_whole_number_of_microseconds_is_refused(value: Parameter) -> None:
    with pytest.raises(InvalidRequest, match=r"timeout.*microseconds"):
        budget_s({}, {"timeout": value})


@given(st.text(max_size=12))
def test_any_text_is_a_positive_budget_or_is_refused(text: str) -> None:
    try:
        given_s = budget_s({"tidegate-budget-ms": text}, {})
    except InvalidRequest:
        return
    assert given_s is not None
    assert 0 < given_s <= MAX_BUDGET_S


def test_a_long_bad_value_is_shown_shortened() -> None:
    with pytest.raises(InvalidRequest) as refused:
        budget_s({"tidegate-budget-ms": "x" * 10_000}, {})
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("value", [0, 1, 7, MAX_PRIORITY])
def test_a_priority_is_a_whole_number(value: int) -> None:
    assert priority_of({"priority": value}) == value


def test_without_a_priority_it_is_the_default() -> None:
    assert priority_of({}) == 0


@pytest.mark.parametrize("value", [-1, MAX_PRIORITY + 1, 2**64 - 1, 1.0, float("nan"), True, "1", "high"])
def test_any_other_priority_is_refused(value: Parameter) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        priority_of({"priority": value})

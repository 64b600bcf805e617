"""The budgets of a generation's tokens, from headers, aliases, parameters, a stream's read timeout and the manifest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.models.generative import GENERATIVE
from tidegate.oip.budget import MAX_BUDGET_S
from tidegate.oip.token_budgets import TokenBudgets, token_budgets
from tidegate.outcome import InvalidRequest
from tidegate.types import Parameter

DEFAULTS = replace(GENERATIVE, default_ttft_s=0.8, default_tpot_s=0.09)


@pytest.mark.parametrize(("headers", "parameters", "wanted"), [
    ({}, {}, (0.8, 0.09)),
    ({"tidegate-ttft-ms": "250"}, {}, (0.25, 0.09)),
    ({"tidegate-ttft-ms": "2500", "tidegate-tpot-ms": "1e2"}, {}, (2.5, 0.1)),
    ({"x-slo-ttft-ms": "300", "x-slo-tpot-ms": "40"}, {}, (0.3, 0.04)),
    ({"tidegate-ttft-ms": "250", "x-slo-ttft-ms": "200"}, {"tidegate-ttft-ms": 220}, (0.2, 0.09)),
    ({}, {"tidegate-ttft-ms": 120, "tidegate-tpot-ms": "12.5"}, (0.12, 0.0125)),
    ({"tidegate-ttft-ms": "1e99"}, {}, (MAX_BUDGET_S, 0.09)),
])  # fmt: skip
def test_the_least_of_each_counts_and_the_models_default_where_there_is_none(
    headers: dict[str, str], parameters: dict[str, Parameter], wanted: tuple[float, float]
) -> None:
    assert token_budgets(headers, parameters, DEFAULTS) == pytest.approx(wanted)


def test_a_model_without_defaults_has_no_budget_unless_its_caller_names_one() -> None:
    assert token_budgets({}, {}, GENERATIVE) == TokenBudgets(None, None)
    assert token_budgets({"tidegate-tpot-ms": "50"}, {}, GENERATIVE) == TokenBudgets(None, 0.05)


def test_answers_without_tokens_have_neither() -> None:
    assert token_budgets({"tidegate-ttft-ms": "50"}, {}, None) == TokenBudgets()


@pytest.mark.parametrize(("timeout", "streamed", "wanted"), [
    ("0.4", True, (0.4, 0.09)),
    ("0.05", True, (0.05, 0.05)),
    ("600", True, (0.7, 0.09)),
    ("0.05", False, (0.7, 0.09)),
])  # fmt: skip
def test_a_read_timeout_bounds_the_silences_of_a_stream(
    timeout: str, streamed: bool, wanted: tuple[float, float]
) -> None:
    headers = {"x-stainless-read-timeout": timeout, "tidegate-ttft-ms": "700", "tidegate-tpot-ms": "90"}
    assert token_budgets(headers, {}, DEFAULTS, streamed=streamed) == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["tidegate-ttft-ms", "tidegate-tpot-ms", "x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("text", ["nan", "inf", "soon", "", "0", "-5", "1_000", "5 ms"])
def test_a_header_that_is_no_budget_is_refused_with_its_name_and_value(name: str, text: str) -> None:
    for generative in (GENERATIVE, None):
        with pytest.raises(InvalidRequest) as refused:
            token_budgets({name: text}, {}, generative)
        assert name in refused.value.message
        assert repr(text) in refused.value.message


@pytest.mark.parametrize("value", [0, -1, True, math.nan, math.inf, "nan", "soon", ""])
def test_a_parameter_that_is_no_budget_is_refused_with_its_name(value: Parameter) -> None:
    with pytest.raises(InvalidRequest, match="parameter 'tidegate-tpot-ms'"):
        token_budgets({}, {"tidegate-tpot-ms": value}, GENERATIVE)


@given(st.text(max_size=12))
def test_any_text_is_a_positive_budget_or_is_refused(text: str) -> None:
    try:
        given_s = token_budgets({"tidegate-ttft-ms": text}, {}, GENERATIVE).ttft_s
    except InvalidRequest:
        return
    assert given_s is not None
    assert 0.0 < given_s <= MAX_BUDGET_S

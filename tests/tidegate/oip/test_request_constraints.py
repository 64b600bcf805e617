"""The constraints of a caller on its answer: read from headers and parameters, the stricter of two, never ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.oip.call import kept_headers
from tidegate.oip.request_constraints import attested_of, min_quality_of, pin_of, resumes_of, variant_of
from tidegate.outcome import InvalidRequest
from tidegate.placement_pin import INSIDE, PINS, Pin, stricter
from tidegate.types import Parameter


@pytest.mark.parametrize(("headers", "parameters", "wanted"), [
    ({}, {}, ""),
    ({"tidegate-variant": "fp32"}, {}, "fp32"),
    ({}, {"tidegate-variant": "int8"}, "int8"),
    ({"tidegate-variant": "int8"}, {"tidegate-variant": "int8"}, "int8"),
])  # fmt: skip
def test_a_variant_is_demanded_by_header_or_parameter(
    headers: dict[str, str], parameters: dict[str, Parameter], wanted: str
) -> None:
    assert variant_of(headers, parameters) == wanted


def test_two_different_demands_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'fp32'.*'int8'"):
        variant_of({"tidegate-variant": "fp32"}, {"tidegate-variant": "int8"})


def test_a_variant_that_is_no_name_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="variant"):
        variant_of({}, {"tidegate-variant": 8})


@pytest.mark.parametrize(("headers", "parameters", "wanted"), [
    ({}, {}, "any"),
    ({"tidegate-pin": "edge"}, {}, "edge"),
    ({}, {"tidegate-pin": "site"}, "site"),
    ({"tidegate-pin": " any "}, {}, "any"),
    ({"tidegate-pin": "any"}, {"tidegate-pin": "edge"}, "edge"),
    ({"tidegate-pin": "edge"}, {"tidegate-pin": "site"}, "edge"),
])  # fmt: skip
def test_of_two_pins_the_stricter_counts(
    headers: dict[str, str], parameters: dict[str, Parameter], wanted: Pin
) -> None:
    assert pin_of(headers, parameters) == wanted


@pytest.mark.parametrize("value", ["", "Edge", "edges", "cloud", "edge,site", "x" * 500])
def test_a_pin_that_is_none_is_refused_with_what_is_allowed(value: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"header tidegate-pin must be one of edge, edge-input, site, any, got '"
    ) as caught:
        pin_of({"tidegate-pin": value}, {})
    assert len(caught.value.message) < 150


@pytest.mark.parametrize("value", [True, 1, 0.5])
def test_a_pin_by_parameter_is_a_word(value: Parameter) -> None:
    with pytest.raises(InvalidRequest, match="parameter 'tidegate-pin' must be one of"):
        pin_of({}, {"tidegate-pin": value})


def test_a_pin_that_is_said_twice_in_headers_is_refused_rather_than_half_heard() -> None:
    headers = kept_headers([("Tidegate-Pin", "edge"), ("tidegate-pin", "any")])
    with pytest.raises(InvalidRequest, match="edge, any"):
        pin_of(headers, {})


@pytest.mark.parametrize(("headers", "parameters", "wanted"), [
    ({}, {}, 0.0),
    ({"tidegate-min-quality": "0.98"}, {}, 0.98),
    ({"tidegate-min-quality": " 1 "}, {}, 1.0),
    ({"tidegate-min-quality": ".5"}, {}, 0.5),
    ({}, {"tidegate-min-quality": 0.7}, 0.7),
    ({}, {"tidegate-min-quality": 1}, 1.0),
    ({}, {"tidegate-min-quality": "0.97"}, 0.97),
    ({"tidegate-min-quality": "0.9"}, {"tidegate-min-quality": 0.7}, 0.9),
    ({"tidegate-min-quality": "0.6"}, {"tidegate-min-quality": 0.7}, 0.7),
])  # fmt: skip
def test_of_two_floors_the_higher_counts(
    headers: dict[str, str], parameters: dict[str, Parameter], wanted: float
) -> None:
    assert min_quality_of(headers, parameters) == wanted


@pytest.mark.parametrize("value", ["", "98", "98%", "1.01", "-0.1", "nan", "inf", "1e-1", "0.9 0.8", "٠.٥", "0" * 500])
def test_a_floor_that_is_no_number_from_0_to_1_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tidegate-min-quality must be a number from 0 to 1, got '") as caught:
        min_quality_of({"tidegate-min-quality": value}, {})
    assert len(caught.value.message) < 150


@pytest.mark.parametrize("value", [True, -1, 2, 1.0001, float("nan"), float("inf"), "high"])
def test_a_floor_by_parameter_is_held_to_the_same(value: Parameter) -> None:
    with pytest.raises(InvalidRequest, match="'tidegate-min-quality' must be a number"):
        min_quality_of({}, {"tidegate-min-quality": value})


@given(st.sampled_from(PINS), st.sampled_from(PINS))
def test_the_stricter_pin_allows_what_both_allow(one: Pin, other: Pin) -> None:
    assert INSIDE[stricter(one, other)] == INSIDE[one] & INSIDE[other]


@pytest.mark.parametrize(("headers", "parameters", "required"), [
    ({}, {}, False),
    ({"tidegate-require": "attested"}, {}, True),
    ({"tidegate-require": " attested, attested"}, {}, True),
    ({}, {"tidegate-require": "attested"}, True),
    ({"tidegate-require": "attested"}, {"tidegate-require": "attested"}, True),
])  # fmt: skip
def test_attested_targets_are_required_by_header_or_parameter(
    headers: dict[str, str], parameters: dict[str, Parameter], required: bool
) -> None:
    assert attested_of(headers, parameters) is required


@pytest.mark.parametrize("value", ["", "Attested", "attested,", "attested, pinned", "none", "x" * 500])
def test_an_unsupported_requirement_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="header tidegate-require can require 'attested' and nothing else"):
        attested_of({"tidegate-require": value}, {})


@pytest.mark.parametrize("value", [True, False, 1, "any"])
def test_a_requirement_by_parameter_is_the_word_and_nothing_else(value: Parameter) -> None:
    with pytest.raises(InvalidRequest, match="parameter 'tidegate-require'"):
        attested_of({"tidegate-require": "attested"}, {"tidegate-require": value})


@pytest.mark.parametrize("words", [("attested", "none"), ("none", "attested")])
def test_of_a_requirement_that_is_said_twice_nothing_is_lost(words: tuple[str, str]) -> None:
    headers = kept_headers(("Tidegate-Require", word) for word in words)
    with pytest.raises(InvalidRequest, match="tidegate-require"):
        attested_of(headers, {})


@pytest.mark.parametrize(("headers", "parameters", "may"), [
    ({}, {}, True),
    ({"tidegate-resume": "auto"}, {}, True),
    ({"tidegate-resume": " never "}, {"tidegate-resume": "auto"}, False),
    ({"tidegate-resume": "auto"}, {"tidegate-resume": "never"}, False),
])  # fmt: skip
def test_of_two_words_on_resuming_the_stricter_counts(
    headers: dict[str, str], parameters: dict[str, Parameter], may: bool
) -> None:
    assert resumes_of(headers, parameters) is may


@pytest.mark.parametrize("value", ["", "Never", "0", "false"])
def test_another_word_on_resuming_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="header tidegate-resume must be auto or never, got"):
        resumes_of({"tidegate-resume": value}, {})
    with pytest.raises(InvalidRequest, match="parameter 'tidegate-resume' must be auto or never, got"):
        resumes_of({}, {"tidegate-resume": value})

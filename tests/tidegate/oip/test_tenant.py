"""A tenant's name: one, readable, short, or an error that says what a name is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.oip.tenant import is_tenant, tenant_of
from tidegate.outcome import InvalidRequest


@pytest.mark.parametrize(
    ("headers", "parameters", "name"),
    [
        ({}, {}, ""),
        ({"tidegate-tenant": "acme"}, {}, "acme"),
        ({}, {"tidegate-tenant": "acme.eu_1-b"}, "acme.eu_1-b"),
        ({"tidegate-tenant": "acme"}, {"tidegate-tenant": "acme"}, "acme"),
    ],
)
def test_header_and_parameter_name_the_tenant(headers: dict[str, str], parameters: dict[str, str], name: str) -> None:
    assert tenant_of(headers, parameters) == name


@pytest.mark.parametrize(
    ("headers", "parameters", "words"),
    [
        ({"tidegate-tenant": ""}, {}, "header tidegate-tenant must be 1 to 64 letters"),
        ({"tidegate-tenant": "-x"}, {}, "got '-x'"),
        ({}, {"tidegate-tenant": 7}, "parameter 'tidegate-tenant' must be"),
        ({"tidegate-tenant": "a"}, {"tidegate-tenant": "b"}, "header tidegate-tenant says 'a' but the parameter"),
    ],
)
def test_what_is_no_name_or_two_is_refused(
    headers: dict[str, str], parameters: dict[str, str | int], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        tenant_of(headers, parameters)


@given(st.text(max_size=100))
def test_names_are_short_and_plain(name: str) -> None:
    if is_tenant(name):
        assert 1 <= len(name) <= 64
        assert name.isascii() and name.isprintable() and " " not in name

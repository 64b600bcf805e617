"""Sequences have an owner: no tenant can say a name that another's sequence goes by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.access.sequence_scope import MOST_CHARACTERS, scope_sequence, scoped_sequence_id
from tidegate.oip.sequence import MAX_ID_CHARACTERS, sequence_of
from tidegate.types import Call, InferRequest, Parameter

TENANTS = st.just("") | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
IDS = st.integers(1, 2**64 - 1) | st.text(min_size=1, max_size=MAX_ID_CHARACTERS)


def call(tenant: str, **parameters: Parameter) -> Call:
    return Call(InferRequest("rnn", (), parameters=parameters), "oip-http", 0.0, tenant=tenant)


@pytest.mark.parametrize(
    ("tenant", "id", "name"),
    [
        ("acme", 7, "acme/7"),
        ("acme", "7", "acme/'7"),
        ("acme#key:3f9a", 7, "acme/7"),
        ("", 7, 7),
        ("", "acme/7", "/'acme/7"),
        ("acme", 0, 0),
        ("acme", "", ""),
        ("acme", True, True),
        ("acme", 1.5, 1.5),
        ("acme", -3, "acme/-3"),
    ],
)
def test_a_sequence_goes_by_its_owners_name(tenant: str, id: Parameter, name: Parameter) -> None:
    seen = scope_sequence(call(tenant, sequence_id=id, sequence_start=True, other=1)).request.parameters
    assert seen == {"sequence_id": name, "sequence_start": True, "other": 1}
    assert type(seen["sequence_id"]) is type(name)


def test_what_belongs_to_no_sequence_is_passed_on_as_it_is() -> None:
    for same in (call("acme", priority=1), call("", sequence_id=7)):
        assert scope_sequence(same) is same


@pytest.mark.slow
@given(TENANTS, IDS, TENANTS, IDS)
def test_two_owners_or_two_ids_never_share_a_name(a: str, x: int | str, b: str, y: int | str) -> None:
    assert (scoped_sequence_id(a, x) == scoped_sequence_id(b, y)) == ((a, x) == (b, y))


@pytest.mark.slow
@given(TENANTS, IDS)
def test_a_name_is_an_id_that_targets_take(tenant: str, id: int | str) -> None:
    name = scoped_sequence_id(tenant, id)
    assert isinstance(name, int) or len(name) <= MOST_CHARACTERS
    assert not isinstance(id, str) or len(str(scoped_sequence_id(tenant, id * 200))) <= MOST_CHARACTERS
    assert sequence_of({"sequence_id": name}) is not None


@pytest.mark.slow
@given(TENANTS, IDS, TENANTS)
def test_who_says_anothers_name_for_a_sequence_gets_one_of_its_own(a: str, id: int | str, b: str) -> None:
    name = scoped_sequence_id(a, id)
    if a != b and a:
        assert isinstance(name, str)
        if len(name) <= MAX_ID_CHARACTERS:
            assert scoped_sequence_id(b, name) != name

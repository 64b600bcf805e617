"""Identities: which names are allowed, and which peers a certificate lets in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.security.certificate_identity import (
    NAME_MAX,
    ROLES,
    CertificateIdentity,
    NotAllowed,
    check_role,
    identity_of,
)

NAMES = st.from_regex(rf"[a-z0-9][a-z0-9._-]{{0,{NAME_MAX - 1}}}", fullmatch=True)
IDENTITIES = st.builds(CertificateIdentity, st.sampled_from(ROLES), NAMES)


@pytest.mark.slow
@given(IDENTITIES)
def test_an_identity_survives_its_spelling(identity: CertificateIdentity) -> None:
    assert (
        CertificateIdentity.parse(str(identity))
        == CertificateIdentity.parse(identity.uri)
        == identity_of([identity.uri])
        == identity
    )
    assert len(identity.common_name) <= 64


@pytest.mark.slow
@given(IDENTITIES, IDENTITIES)
def test_no_two_identities_share_a_host_name_or_a_user_name(
    one: CertificateIdentity, other: CertificateIdentity
) -> None:
    assert (one == other) == (one.host == other.host) == (one.common_name == other.common_name)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("edge-1", "ROLE/NAME"),
        ("king/edge-1", "'king'"),
        ("edge/Edge-1", "'Edge-1'"),
        ("edge/gw~main", "'gw~main'"),
        ("edge/../ca", "'../ca'"),
        ("edge/a\n", "'a\\n'"),
        ("edge/" + "a" * (NAME_MAX + 1), "1 to 40"),
        ("edge/", "''"),
    ],
)
def test_what_is_no_identity_is_refused_in_words(text: str, names: str) -> None:
    with pytest.raises(ValueError) as refusal:
        CertificateIdentity.parse(text)
    assert names in str(refusal.value)


def test_only_an_edge_has_a_user_name_that_the_brokers_patterns_let_through() -> None:
    bare = {role: CertificateIdentity(role, "x").common_name for role in ROLES}
    assert bare == {
        "edge": "x", "gateway": "gw~x", "pool": "pool~x", "broker": "broker#x", "client": "client#x"
    }  # fmt: skip


GATEWAY, EDGE = CertificateIdentity("gateway", "main").uri, CertificateIdentity("edge", "edge-1").uri


def test_a_peer_of_an_allowed_role_is_distinguished_by_name() -> None:
    assert check_role(["localhost", GATEWAY], {"gateway"}) == CertificateIdentity("gateway", "main")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([EDGE], "yours is edge/edge-1's"),
        ([], "names no one"),
        (["gateway.example"], "names no one"),
        ([GATEWAY, EDGE], "names no one"),
        (["tidegate://gateway/"], "names no one"),
        (["tidegate://GATEWAY/main"], "names no one"),
    ],
)
def test_anybody_else_is_refused_by_name(names: list[str], why: str) -> None:
    with pytest.raises(NotAllowed, match=why):
        check_role(names, {"gateway"})


def test_where_strangers_are_let_in_ours_are_still_held_to_their_role() -> None:
    assert check_role(["broker.example"], {"broker"}, ours_only=False) is None
    with pytest.raises(NotAllowed, match="yours is edge/edge-1's"):
        check_role([EDGE], {"broker"}, ours_only=False)
    with pytest.raises(NotAllowed, match="names no one"):
        check_role([EDGE, GATEWAY], {"broker"}, ours_only=False)

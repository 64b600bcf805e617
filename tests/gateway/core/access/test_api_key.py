"""Keys are shown once, kept as hashes, and good for as long as they should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.core.access.api_key import (
    ID_BYTES,
    SALT_BYTES,
    SECRET_BYTES,
    UNMATCHABLE_KEY,
    KeyRecord,
    KeyVerifier,
    new_key,
    parse_key,
    secret_digest,
    with_new_secret,
)
from tidegate.caller import Grant

ALL = ID_BYTES + SALT_BYTES + SECRET_BYTES
GRANT = Grant("acme")


def secret_of(text: str) -> bytes:
    found = parse_key(text)
    assert found is not None
    return found.secret


def new(chance: bytes = bytes(range(ALL)), *, expires_at: float | None = None) -> tuple[KeyRecord, str]:
    return new_key(GRANT, chance, utc_s=100.0, expires_at=expires_at)


def test_what_is_kept_holds_neither_the_secret_nor_what_would_open_it() -> None:
    record, text = new()

    assert text == f"tg_{record.id}_{bytes(range(ALL))[-SECRET_BYTES:].hex()}"
    assert secret_of(text).hex() not in repr(record) + str(record.secrets) + repr(KeyVerifier(record)) + repr(
        parse_key(text)
    )
    assert KeyVerifier(record).opens(secret_of(text), 100.0)
    assert not KeyVerifier(record).opens(bytes.fromhex(record.secrets[0].digest), 100.0)


@given(st.binary(min_size=ALL, max_size=ALL), st.integers(0, SECRET_BYTES * 8 - 1))
def test_a_secret_that_differs_in_any_one_bit_opens_nothing(chance: bytes, bit: int) -> None:
    record, text = new(chance)
    other = bytearray(secret_of(text))
    other[bit // 8] ^= 1 << bit % 8

    assert KeyVerifier(record).opens(secret_of(text), 0.0)
    assert not KeyVerifier(record).opens(bytes(other), 0.0)


def test_equal_secrets_are_kept_as_different_hashes() -> None:
    assert secret_digest(b"s" * SECRET_BYTES, b"a" * SALT_BYTES) != secret_digest(
        b"s" * SECRET_BYTES, b"b" * SALT_BYTES
    )


@pytest.mark.parametrize(
    "text",
    ["", "tg_", "tg_12_34", f"tg_{'0' * 12}_{'g' * 64}", f"tg_{'0' * 12}_{'0' * 64}\n", f"TG_{'0' * 12}_{'0' * 64}"],
)
def test_what_has_not_the_form_of_a_key_is_none(text: str) -> None:
    assert parse_key(text) is None


def test_nothing_opens_the_lock_that_stands_in_for_an_unknown_id() -> None:
    assert not UNMATCHABLE_KEY.opens(bytes(SECRET_BYTES), 0.0)


def test_a_rotated_key_has_two_good_secrets_for_a_while_and_one_afterwards() -> None:
    record, old = new()
    renewed, text = with_new_secret(record, b"n" * SECRET_BYTES, utc_s=200.0, overlap_s=50.0)
    lock = KeyVerifier(renewed)

    assert renewed.id == record.id
    assert [lock.opens(secret_of(one), 249.9) for one in (old, text)] == [True, True]
    assert [lock.opens(secret_of(one), 250.0) for one in (old, text)] == [False, True]


def test_of_a_key_that_is_rotated_twice_only_the_last_two_secrets_are_left() -> None:
    record, first = new()
    second_record, second = with_new_secret(record, b"2" * SECRET_BYTES, utc_s=200.0, overlap_s=1e6)
    third_record, third = with_new_secret(second_record, b"3" * SECRET_BYTES, utc_s=300.0, overlap_s=1e6)

    assert [KeyVerifier(third_record).opens(secret_of(one), 301.0) for one in (first, second, third)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("expires_at", "revoked_at", "now", "standing"),
    [
        (None, None, 9e9, "valid"),
        (500.0, None, 499.9, "valid"),
        (500.0, None, 500.0, "expired"),
        (500.0, 400.0, 450.0, "revoked"),
        (500.0, 400.0, 600.0, "revoked"),
    ],
)
def test_standing(expires_at: float | None, revoked_at: float | None, now: float, standing: str) -> None:
    record, _ = new(expires_at=expires_at)
    assert replace(record, revoked_at=revoked_at).standing(now) == standing
    assert KeyVerifier(record).identity.id == f"key:{record.id}"

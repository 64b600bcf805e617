"""This module creates API keys, defines what is stored of a key, and checks a presented one. Pure.

    tg_<id>_<secret>     id: 12 hex digits, public, names the key in lists and logs · secret: 64 hex digits, 256 bits

Kept is a salted BLAKE2b hash of the secret. A slow hash (bcrypt, argon2) makes guessing expensive where people choose
the secret; 256 random bits are never guessed however fast the hash is, while 100 ms of it per request would make a
flood of requests costly. The salt keys the hash, so equal secrets in two files cannot be recognized.

An unknown id takes the same path as a known one, over a record that nothing matches, and secrets are compared in
constant time: how long a refusal takes says nothing. Only a caller with the right secret learns that a key is expired
or revoked.

Rotation gives a key another secret under the same id, and leaves the old one good until `until`: clients change over
one by one, and the tenant's budgets and the audit's lines stay those of one key.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from hmac import compare_digest
from math import inf
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from tidegate.caller import Grant, Identity

PREFIX: Final = "tg_"
ID_BYTES: Final = 6
SECRET_BYTES: Final = 32
SALT_BYTES: Final = 16
_KEY: Final = re.compile(rf"tg_([0-9a-f]{{{2 * ID_BYTES}}})_([0-9a-f]{{{2 * SECRET_BYTES}}})", re.ASCII)

Standing = Literal["valid", "expired", "revoked"]


class KeySecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is kept of one secret; `until` (UTC seconds): when it stops being good, after a rotation."""

    digest: str
    until: float | None = None


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key as the file has it. Instants are UTC seconds."""

    id: str
    salt: str
    secrets: tuple[KeySecret, ...]  # the newest first, and at most two
    grant: Grant
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    note: str = ""

    def standing(self, utc_s: float) -> Standing:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and utc_s >= self.expires_at else "valid"

    def __repr__(self) -> str:
        return f"<KeyRecord {self.id} of {self.grant.tenant}>"


class PresentedKey(NamedTuple):
    """A key that was shown, in its two parts."""

    id: str
    secret: bytes

    def __repr__(self) -> str:
        return f"<PresentedKey {self.id}>"


class KeyVerifier:
    """A record made ready to be tried."""

    __slots__ = ("_digests", "_salt", "identity", "record")

    def __init__(self, record: KeyRecord) -> None:
        self.record = record
        self.identity = Identity(
            f"key:{record.id}", record.grant, inf if record.expires_at is None else record.expires_at
        )
        self._salt = bytes.fromhex(record.salt)
        self._digests = [(bytes.fromhex(one.digest), one.until) for one in record.secrets]

    def opens(self, secret: bytes, utc_s: float) -> bool:
        """Whether it is one of this record's secrets, and still good as such."""
        digest, found = secret_digest(secret, self._salt), False
        for kept, until in self._digests:
            found |= compare_digest(kept, digest) and (until is None or utc_s < until)
        return found

    def __repr__(self) -> str:
        return f"<KeyVerifier {self.record.id}>"


def parse_key(text: str) -> PresentedKey | None:
    """The two parts of a key; None: it is none."""
    found = _KEY.fullmatch(text)
    return PresentedKey(found[1], bytes.fromhex(found[2])) if found else None


def secret_digest(secret: bytes, salt: bytes) -> bytes:
    return blake2b(secret, key=salt, digest_size=32).digest()


def new_key(
    grant: Grant, chance: bytes, *, utc_s: float, expires_at: float | None = None, note: str = ""
) -> tuple[KeyRecord, str]:
    """A new key: what to keep, and what to hand out once.

    Args: chance: ID_BYTES + SALT_BYTES + SECRET_BYTES of good randomness.
    """
    id, salt, secret = chance[:ID_BYTES].hex(), chance[ID_BYTES : ID_BYTES + SALT_BYTES], chance[-SECRET_BYTES:]
    kept = KeySecret(secret_digest(secret, salt).hex())
    return KeyRecord(
        id=id,
        salt=salt.hex(),
        secrets=(kept,),
        grant=grant,
        created_at=utc_s,
        expires_at=expires_at,
        revoked_at=None,
        note=note,
    ), f"{PREFIX}{id}_{secret.hex()}"


def with_new_secret(record: KeyRecord, chance: bytes, *, utc_s: float, overlap_s: float) -> tuple[KeyRecord, str]:
    """The key with another secret; the newest of the old ones stays good for `overlap_s`.

    Args: chance: SECRET_BYTES of good randomness.
    """
    new = KeySecret(secret_digest(chance, bytes.fromhex(record.salt)).hex())
    old = replace(record.secrets[0], until=utc_s + overlap_s)
    return replace(record, secrets=(new, old)), f"{PREFIX}{record.id}_{chance.hex()}"


# What nothing opens: the digest of no secret that anybody holds, tried in the place of a record that is not there.
UNMATCHABLE_KEY: Final = KeyVerifier(KeyRecord("", "00" * SALT_BYTES, (KeySecret("00" * 32),), Grant("nobody"), 0.0))

"""Software evidence is a measurement, signed by a key that the operator allowed.

It states that a process which holds this attestation key serves these files, in this version of Tidegate, and answers
this very challenge. The key's owner vouches for the rest. An attacker with the key, or with rights on the machine, can
state anything: software cannot prove what machine it runs on. This kind does promise that requests which require it
reach only processes that an operator enrolled by name, serving what was measured, and that taking the key off the list
ends that within seconds. It is the whole path of hardware evidence with a weaker root.

Ed25519 (RFC 8032) over a domain, so that no signature made here means anything elsewhere, and the statement's bytes as
they are sent: nothing is spelled twice. A key's id is the first half of its SHA-256.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tidegate.security.attestation.measurement import Measurement
from tidegate.security.attestation.verdict import (
    AttestationPolicy,
    Challenge,
    RefusedEvidence,
    Verdict,
    VerifiedEvidence,
)

KIND: Final = "software"
KEY_BYTES: Final = 32
_DOMAIN: Final = b"tidegate attestation, software evidence, 1\0"


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is signed."""

    measurement: Measurement
    report_data: bytes


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    statement: bytes
    key: bytes
    signature: bytes


def key_id(public: bytes) -> str:
    """32 hexadecimal digits that name a public key."""
    return sha256(public).hexdigest()[:32]


def sign(key: Ed25519PrivateKey, measurement: Measurement, challenge: Challenge) -> bytes:
    """The evidence."""
    statement = msgspec.msgpack.encode(Statement(measurement, challenge.report_data))
    public = key.public_key().public_bytes_raw()
    return msgspec.msgpack.encode(Evidence(statement, public, key.sign(_DOMAIN + statement)))


def verify(raw: bytes, challenge: Challenge, now: float, policy: AttestationPolicy) -> Verdict:
    """A `Verifier`."""
    try:
        evidence = msgspec.msgpack.decode(raw, type=Evidence)
        statement = msgspec.msgpack.decode(evidence.statement, type=Statement)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return RefusedEvidence("unreadable", f"its software evidence cannot be read: {error}")
    name = key_id(evidence.key)
    if policy.keys.get(name) != evidence.key:
        return RefusedEvidence("unknown-key", f"its attestation key {name} is not among those allowed")
    if not _is_signed(evidence):
        return RefusedEvidence("wrong-signature", f"its evidence is not signed by the key {name}, as it says")
    if statement.report_data != challenge.report_data:
        return RefusedEvidence(
            "wrong-challenge", "its evidence answers another challenge: it is old, or was made for others"
        )
    digest = statement.measurement.digest
    if policy.measurements and digest not in policy.measurements:
        return RefusedEvidence("wrong-measurement", f"its measurement {digest} is not among those allowed")
    return VerifiedEvidence(KIND, name, now + policy.max_age_s)


def _is_signed(evidence: Evidence) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(evidence.key).verify(evidence.signature, _DOMAIN + evidence.statement)
    except (InvalidSignature, ValueError):
        return False
    return True

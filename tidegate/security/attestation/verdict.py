"""A verifier turns evidence into a verdict; each kind of evidence has one pure function, found by the kind's name.

    verifier(evidence, challenge, now, policy) → Verified(kind, key_id, expires_at) | Refused(reason, words)

A verifier gets the evidence as bytes and the challenge that it must answer: the nonce of the asker, the TLS key of
the answerer, and the TLS key by which the asker was seen (`proof.py` says why both). `Challenge.report_data` is
all three in 64 bytes, which is what hardware lets the measured software put into its report: SEV-SNP's REPORT_DATA,
TDX's REPORTDATA. So a further kind is one entry in `VERIFIERS` of `proof.py`: its verifier checks the report's
signature up to the maker's root, compares these 64 bytes, and looks its measurement up in the policy.

A verdict's end is in UTC seconds, like certificates'. It never lies further away than the policy lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha512
from typing import Final, Literal, NamedTuple

NONCE_BYTES: Final = 32
HASH_BYTES: Final = 32
_DOMAIN: Final = b"tidegate attestation, challenge, 1\0"

Reason = Literal[
    "unreadable", "unknown-kind", "wrong-certificate", "wrong-proof", "wrong-challenge", "unknown-key",
    "wrong-signature", "wrong-measurement",
]  # fmt: skip


class Challenge(NamedTuple):
    """What evidence must answer to: each part has 32 bytes."""

    nonce: bytes
    target_key: bytes  # SHA-256 of the answerer's TLS public key
    asker_key: bytes  # SHA-256 of the TLS public key by which the asker was seen

    @property
    def report_data(self) -> bytes:
        """64 bytes that no other challenge has. Raises ValueError for parts of another length."""
        if len(self.nonce) != NONCE_BYTES or {len(self.target_key), len(self.asker_key)} != {HASH_BYTES}:
            raise ValueError("a challenge has a nonce and two key hashes of 32 bytes each")
        return sha512(_DOMAIN + self.nonce + self.target_key + self.asker_key).digest()


@dataclass(frozen=True, slots=True)
class AttestationPolicy:
    """Which evidence is trusted.

    Attributes:
        keys: Ed25519 public keys (32 bytes) by key id.
        measurements: digests that are allowed; empty: any that an allowed key has signed.
        max_age_s: how long a verdict counts, from when the evidence was requested.
    """

    keys: Mapping[str, bytes] = field(default_factory=dict)
    measurements: frozenset[str] = frozenset()
    max_age_s: float = 600.0


class VerifiedEvidence(NamedTuple):
    """Good evidence, until `expires_at` (UTC seconds)."""

    kind: str
    key_id: str
    expires_at: float


class RefusedEvidence(NamedTuple):
    """Evidence that shows nothing. The words are for operators and callers; the reason is for programs."""

    reason: Reason
    words: str


Verdict = VerifiedEvidence | RefusedEvidence
Verifier = Callable[[bytes, Challenge, float, AttestationPolicy], Verdict]

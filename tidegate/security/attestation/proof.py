"""A proof binds a target's evidence to this connection, so that no other machine can present it.

Evidence alone describes some machine. The gateway must know that the machine at the other end is that one. TLS
has checked the other end's certificate, but gRPC shows its client neither the certificate nor the channel's keys
(no exporter, RFC 9266), so the binding is made above it, out of three things that the target signs together:

    nonce        chosen by the gateway for this challenge, so that no stored answer fits
    target key   the hash of the target's TLS public key. The certificate comes along: of the gateway's own CA, in
                 force, and naming exactly the target that was dialled. The TLS key signs the challenge too
    asker key    the hash of the TLS public key that the target saw at the other end of *its* connection

The gateway knows by which key of its own this connection was made, and takes evidence for that one only. It comes as
frames of the stream that carries requests, so it is about that connection and about no other of the same channel.

**Relays.** An attacker between the two that holds neither key can only pass TLS records on. An attacker that has stolen
the target's TLS key can stand in its place, and answer the certificate's part of the challenge; the evidence must come
from the true target, which answers over connections of gateways only and signs the key of the asker that it sees: the
attacker's, or, if another gateway asks for it, that gateway's. Neither is the key of the real asker. To relay, the
attacker also needs the gateway's key, or the target's attestation key; with the latter it cannot be told from the
target, for software evidence. So the peer is bound from both sides, without fetching the peer's certificate by a
handshake of one's own before each dial, which would bind nothing to *this* connection, and cost a second one.

The TLS key's signature seems to add nothing to that, and does for hardware evidence: a report signed by a chip names
no target, and one honest machine could otherwise be presented under another's name by an account that may get
certificates.

Limit: what the target does after it has answered. A verdict is about the moment of the challenge, which is repeated
before the verdict expires.
"""

from __future__ import annotations

import warnings
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.utils import CryptographyDeprecationWarning

from tidegate.security.attestation import software
from tidegate.security.attestation.verdict import (
    AttestationPolicy,
    Challenge,
    RefusedEvidence,
    Verdict,
    VerifiedEvidence,
    Verifier,
)
from tidegate.security.authority import read_issued

MAX_BYTES: Final = 2**20
_DOMAIN: Final = b"tidegate attestation, tls key, 1\0"
VERIFIERS: Final[dict[str, Verifier]] = {software.KIND: software.verify}


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    evidence: bytes
    certificate: bytes  # the target's, DER
    signature: bytes  # by the certificate's key: ECDSA with SHA-256


def key_hash(certificate: x509.Certificate) -> bytes:
    """SHA-256 of a certificate's public key (its SubjectPublicKeyInfo)."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return sha256(certificate.public_key().public_bytes(serialization.Encoding.DER, form)).digest()


def make_proof(
    kind: str, evidence: bytes, challenge: Challenge, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> bytes:
    """The bytes to send."""
    signature = key.sign(_signed_part(kind, evidence, challenge), ec.ECDSA(hashes.SHA256()))
    return msgspec.msgpack.encode(
        Proof(kind, evidence, certificate.public_bytes(serialization.Encoding.DER), signature)
    )


def _certificate(der: bytes) -> x509.Certificate:
    """Raises ValueError. What RFC 5280 forbids is refused, and is no warning on our standard error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)
        certificate = x509.load_der_x509_certificate(der)
        if certificate.serial_number <= 0:
            raise ValueError("the serial number of its certificate is not positive")
    if not _names_one_algorithm(certificate, der):
        raise ValueError("its certificate names two signature algorithms")
    return certificate


def _names_one_algorithm(certificate: x509.Certificate, der: bytes) -> bool:
    """Whether the algorithm beside the signature is the one that is signed (RFC 5280, 4.1.1.2).

    The library verifies by the signed one alone and does not compare the two, so the other could be anything.
    """
    signed = certificate.tbs_certificate_bytes
    at = der.index(signed) + len(signed)
    beside = der[at : at + 2 + der[at + 1]]  # an identifier is shorter than 128 bytes: one byte says its length
    number = certificate.serial_number
    serial = number.to_bytes(number.bit_length() // 8 + 1)
    return b"\x02" + bytes([len(serial)]) + serial + beside in signed  # in the signed part it follows the serial number


def verify_proof(
    raw: bytes, *, target: str, nonce: bytes, asker_key: bytes, ca: bytes, now: float, policy: AttestationPolicy
) -> Verdict:
    """What the bytes that `target` sent are worth.

    Args:
        target: "edge/NAME" or "pool/NAME", which its certificate must name.
        asker_key: the hash of the public key by which this connection was made.
        ca: PEM, one certificate or more: the CAs that may have signed the target's.
        now: UTC seconds, when the evidence was requested.
    """
    try:
        if len(raw) > MAX_BYTES:
            raise ValueError(f"{len(raw)} bytes; at most {MAX_BYTES} are read")
        proof = msgspec.msgpack.decode(raw, type=Proof)
        certificate = _certificate(proof.certificate)
    except (msgspec.MsgspecError, ValueError, RecursionError, x509.InvalidVersion) as error:
        return RefusedEvidence("unreadable", f"what it sent for evidence cannot be read: {error}")
    if fault := _fault(certificate, target, ca, now):
        return RefusedEvidence("wrong-certificate", f"the certificate in its evidence {fault}")
    challenge = Challenge(nonce, key_hash(certificate), asker_key)
    if not _is_signed(proof, certificate, challenge):
        return RefusedEvidence(
            "wrong-proof", "its evidence was made for another challenge or connection, or not with its TLS key"
        )
    verifier = VERIFIERS.get(proof.kind)
    if verifier is None:
        known = ", ".join(sorted(VERIFIERS))
        return RefusedEvidence(
            "unknown-kind", f"its evidence is of the kind {proof.kind[:40]!r}; this gateway verifies {known}"
        )
    verdict = verifier(proof.evidence, challenge, now, policy)
    if isinstance(verdict, VerifiedEvidence):
        ends = certificate.not_valid_after_utc.timestamp()
        return verdict._replace(expires_at=min(verdict.expires_at, ends))
    return verdict


def _fault(certificate: x509.Certificate, target: str, ca: bytes, now: float) -> str:
    """Why the certificate is not the target's; "" when it is."""
    try:
        issued = read_issued(certificate.public_bytes(serialization.Encoding.PEM))
        authorities = x509.load_pem_x509_certificates(ca)
        is_ours = any(_issued_by(certificate, one) for one in authorities)
    except (
        ValueError,
        TypeError,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        UnsupportedAlgorithm,
    ) as error:
        return f"cannot be used: {error}"
    if not is_ours:
        return "is not of the CA that `tls.ca` names"
    if str(issued.identity) != target:
        return f"is {issued.identity}'s, and this is {target}"
    instant = datetime.fromtimestamp(now, UTC)
    if not certificate.not_valid_before_utc <= instant < certificate.not_valid_after_utc:
        return "is not in force"
    return ""


def _issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_signed(proof: Proof, certificate: x509.Certificate, challenge: Challenge) -> bool:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(proof.signature, _signed_part(proof.kind, proof.evidence, challenge), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _signed_part(kind: str, evidence: bytes, challenge: Challenge) -> bytes:
    return _DOMAIN + challenge.report_data + sha256(kind.encode()).digest() + sha256(evidence).digest()

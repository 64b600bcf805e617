"""Evidence is believed for one target, one connection, one question and a while: every other use of it is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from hashlib import sha256

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from tests.support.serving.hosts import ECHO
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.security.attestation import software
from tidegate.security.attestation.measurement import Measurement, ServedVariant, measure_process
from tidegate.security.attestation.proof import MAX_BYTES, VERIFIERS, Proof, key_hash, make_proof, verify_proof
from tidegate.security.attestation.verdict import (
    AttestationPolicy,
    Challenge,
    Reason,
    RefusedEvidence,
    Verdict,
    VerifiedEvidence,
)
from tidegate.security.authority import Authority, CertificatePair
from tidegate.security.certificate_identity import CertificateIdentity

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
NOW_S = NOW.timestamp()
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
PUBLIC = KEY.public_key().public_bytes_raw()
KEY_ID = software.key_id(PUBLIC)
MEASUREMENT = Measurement("1.0", (ServedVariant("echo", "3", "fp32", "0" * 64),))
POLICY = AttestationPolicy({KEY_ID: PUBLIC}, max_age_s=600.0)
NONCE, ASKER = b"n" * 32, sha256(b"the gateway's key").digest()


@cache
def authority(name: str) -> Authority:
    return Authority.make(name, valid=timedelta(days=100), now=NOW - timedelta(days=50))


@cache
def pair(who: str = "edge/edge-1", ca: str = "ours", days: float = 10, begins_days: float = -1) -> CertificatePair:
    begins = NOW + timedelta(days=begins_days)
    return authority(ca).issue(CertificateIdentity.parse(who), (), valid=timedelta(days=days), now=begins)


def sent(
    *,
    tls: CertificatePair | None = None,
    nonce: bytes = NONCE,
    asker: bytes = ASKER,
    key: Ed25519PrivateKey = KEY,
    kind: str = software.KIND,
    measurement: Measurement = MEASUREMENT,
) -> bytes:
    """What a target sends."""
    certificate, tls_key = parts(tls or pair())
    challenge = Challenge(nonce, key_hash(certificate), asker)
    return make_proof(kind, software.sign(key, measurement, challenge), challenge, certificate, tls_key)


def parts(tls: CertificatePair) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = serialization.load_pem_private_key(tls.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return x509.load_pem_x509_certificate(tls.cert), key


def judged(raw: bytes, *, nonce: bytes = NONCE, asker: bytes = ASKER, policy: AttestationPolicy = POLICY) -> Verdict:
    return verify_proof(
        raw,
        target="edge/edge-1",
        nonce=nonce,
        asker_key=asker,
        ca=authority("ours").pair.cert,
        now=NOW_S,
        policy=policy,
    )


def test_evidence_for_this_question_is_verified_for_as_long_as_the_policy_lets_it() -> None:
    assert judged(sent()) == VerifiedEvidence("software", KEY_ID, NOW_S + 600.0)


def test_it_counts_no_longer_than_the_targets_certificate() -> None:
    short = pair(days=1.0 + 60.0 / 86_400, begins_days=-1)  # a minute is left
    assert judged(sent(tls=short)) == VerifiedEvidence("software", KEY_ID, NOW_S + 60.0)


def test_a_measurement_that_is_allowed_by_name_is_verified() -> None:
    assert isinstance(
        judged(sent(), policy=AttestationPolicy({KEY_ID: PUBLIC}, frozenset({MEASUREMENT.digest}))), VerifiedEvidence
    )


def stitched(**changed: object) -> bytes:
    """A proof with parts of another."""
    return msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(sent(), type=Proof), **changed)  # type: ignore[arg-type]
    )


def under_another_name() -> bytes:
    """Software evidence of an allowed key under a TLS proof of its own, by a target that holds no such key."""
    certificate, tls_key = parts(pair())
    theirs = msgspec.msgpack.decode(sent(tls=pair("edge/edge-2")), type=Proof)
    return make_proof(
        software.KIND, theirs.evidence, Challenge(NONCE, key_hash(certificate), ASKER), certificate, tls_key
    )


def resigned() -> bytes:
    """An allowed key's name over a statement that it did not sign."""
    certificate, tls_key = parts(pair())
    challenge = Challenge(NONCE, key_hash(certificate), ASKER)
    forged = msgspec.msgpack.decode(software.sign(OTHER_KEY, MEASUREMENT, challenge), type=software.Evidence)
    evidence = msgspec.msgpack.encode(msgspec.structs.replace(forged, key=PUBLIC))
    return make_proof(software.KIND, evidence, challenge, certificate, tls_key)


REFUSED: dict[str, tuple[Callable[[], bytes], Reason, str]] = {
    "another question's": (lambda: sent(nonce=b"m" * 32), "wrong-proof", "another challenge or connection"),
    "relayed to another asker": (lambda: sent(asker=b"r" * 32), "wrong-proof", "another challenge or connection"),
    "another target's": (lambda: sent(tls=pair("edge/edge-2")), "wrong-certificate", "is edge/edge-2's"),
    "another target's, under this one's certificate": (
        lambda: stitched(certificate=parts(pair("edge/edge-1", "ours", 9))[0].public_bytes(serialization.Encoding.DER)),
        "wrong-proof",
        "not with its TLS key",
    ),
    "another target's evidence, under this one's proof": (under_another_name, "wrong-challenge", "was made for others"),
    "of another CA": (lambda: sent(tls=pair(ca="theirs")), "wrong-certificate", "not of the CA"),
    "of an ended certificate": (lambda: sent(tls=pair(begins_days=-11)), "wrong-certificate", "is not in force"),
    "of a certificate to come": (lambda: sent(tls=pair(begins_days=2)), "wrong-certificate", "is not in force"),
    "by a key that nobody allowed": (lambda: sent(key=OTHER_KEY), "unknown-key", "is not among those allowed"),
    "under an allowed key's name": (resigned, "wrong-signature", f"not signed by the key {KEY_ID}"),
    "of an unknown kind": (lambda: sent(kind="sev-snp"), "unknown-kind", "'sev-snp'; this gateway verifies software"),
    "too large": (lambda: b"x" * (MAX_BYTES + 1), "unreadable", "at most"),
    "nothing": (lambda: b"", "unreadable", "cannot be read"),
    "no software evidence": (
        lambda: make_proof("software", b"?", Challenge(NONCE, key_hash(parts(pair())[0]), ASKER), *parts(pair())),
        "unreadable",
        "its software evidence cannot be read",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_for_this_question_of_this_target_is_refused_by_name(name: str) -> None:
    make, reason, words = REFUSED[name]
    verdict = judged(make())
    assert isinstance(verdict, RefusedEvidence)
    assert verdict.reason == reason
    assert words in verdict.words


def test_a_measurement_that_is_not_allowed_is_refused_with_its_digest() -> None:
    verdict = judged(sent(), policy=AttestationPolicy({KEY_ID: PUBLIC}, frozenset({"f" * 64})))
    assert isinstance(verdict, RefusedEvidence) and verdict.reason == "wrong-measurement"
    assert MEASUREMENT.digest in verdict.words


def test_a_certificate_whose_key_is_of_another_kind_proves_nothing() -> None:
    ca = serialization.load_pem_private_key(authority("ours").pair.key, None)
    assert isinstance(ca, ec.EllipticCurvePrivateKey)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("tidegate://edge/edge-1")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority("ours").cert.subject)
        .public_key(KEY.public_key())
        .serial_number(1)
        .not_valid_before(NOW - timedelta(days=1))
        .not_valid_after(NOW + timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(ca, hashes.SHA256())
    )
    verdict = judged(stitched(certificate=certificate.public_bytes(serialization.Encoding.DER)))
    assert isinstance(verdict, RefusedEvidence) and verdict.reason == "wrong-proof"


def test_a_ca_that_cannot_be_read_verifies_no_target() -> None:
    verdict = verify_proof(
        sent(), target="edge/edge-1", nonce=NONCE, asker_key=ASKER, ca=b"?", now=NOW_S, policy=POLICY
    )
    assert isinstance(verdict, RefusedEvidence) and verdict.reason == "wrong-certificate"


def test_a_further_kind_is_one_entry_and_gets_the_64_bytes_that_hardware_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def chip(evidence: bytes, challenge: Challenge, now: float, policy: AttestationPolicy) -> Verdict:
        seen.append(challenge.report_data)
        return VerifiedEvidence("chip", "vcek-1", now + policy.max_age_s)

    monkeypatch.setitem(VERIFIERS, "chip", chip)
    assert judged(sent(kind="chip")) == VerifiedEvidence("chip", "vcek-1", NOW_S + 600.0)
    assert [len(one) for one in seen] == [64]


@pytest.mark.slow
@given(st.integers(0, 2**16), st.integers(1, 255))
def test_with_any_byte_changed_nothing_is_verified(place: int, flip: int) -> None:
    raw = bytearray(_SENT)
    raw[place % len(raw)] ^= flip
    assert isinstance(judged(bytes(raw)), RefusedEvidence)


def test_a_certificate_with_an_odd_serial_number_is_refused_without_a_word_on_standard_error() -> None:
    serial = x509.load_pem_x509_certificate(pair().cert).serial_number
    raw = bytearray(_SENT)
    raw[_SENT.index(serial.to_bytes((serial.bit_length() + 7) // 8))] |= 0x80  # which makes it negative
    assert isinstance(judged(bytes(raw)), RefusedEvidence)


def test_a_certificate_that_names_another_algorithm_beside_its_signature_is_refused() -> None:
    before, algorithm, after = _SENT.rpartition(b"\x2a\x86\x48\xce\x3d\x04\x03\x02")  # ecdsa-with-SHA256
    assert algorithm and isinstance(judged(before + algorithm + after), VerifiedEvidence)
    assert isinstance(judged(before + algorithm[:-1] + b"\x03" + after), RefusedEvidence)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x7a"),  # a version of X.509 that nobody has made
        (b"\x86\x16tidegate:", b"\xa3\x16tidegate:"),  # a kind of name that the library does not read
    ],
)
def test_a_certificate_that_the_library_does_not_know_is_refused_and_no_error(was: bytes, becomes: bytes) -> None:
    assert was in _SENT
    assert isinstance(judged(_SENT.replace(was, becomes)), RefusedEvidence)


@pytest.mark.slow
@given(st.binary(max_size=300))
def test_whatever_comes_is_refused_and_never_an_error(raw: bytes) -> None:
    assert isinstance(judged(raw), RefusedEvidence)
    assert isinstance(judged(stitched(evidence=raw)), RefusedEvidence)
    assert isinstance(judged(stitched(certificate=raw)), RefusedEvidence)
    assert isinstance(judged(stitched(signature=raw)), RefusedEvidence)
    assert isinstance(software.verify(raw, Challenge(NONCE, ASKER, ASKER), NOW_S, POLICY), RefusedEvidence)


@pytest.mark.slow
@given(*[st.binary(min_size=32, max_size=32)] * 3)
def test_no_two_challenges_share_their_report_data(nonce: bytes, target: bytes, asker: bytes) -> None:
    one = Challenge(nonce, target, asker)
    others = {Challenge(target, nonce, asker), Challenge(nonce, asker, target), Challenge(asker, target, nonce)}
    assert all(other.report_data != one.report_data for other in others if other != one)


@pytest.mark.parametrize("parts_", [(b"", ASKER, ASKER), (NONCE, b"", ASKER), (NONCE, ASKER, ASKER + b"x")])
def test_a_challenge_has_parts_of_32_bytes(parts_: tuple[bytes, bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        _ = Challenge(*parts_).report_data


def test_a_measurement_names_what_is_served_whatever_the_order_of_offers() -> None:
    fp32 = ModelOffer("echo", "3", (VariantOffer("fp32", "fp32"), VariantOffer("odd", "fp32")))
    found = measure_process("1.0", (fp32,), lambda _name, _version: ECHO)
    digests = {one.name: one.sha256 for one in ECHO.variants}
    assert [(one.variant, one.sha256) for one in found.served] == [
        ("fp32", digests.get("fp32", "unknown")),
        ("odd", "unknown"),
    ]
    again = measure_process("1.0", (fp32,), lambda _name, _version: ECHO)
    assert again.digest == found.digest != measure_process("1.1", (fp32,), lambda _name, _version: ECHO).digest


_SENT = sent()

"""The attester makes evidence of this process, anew for each challenge.

It measures what the process offers at that moment. Both keys lie on disk and are read by this process: the TLS key
when it signs, since a renewal puts another one there; the attestation key once, at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field

from tidegate.config import ConfigError, Section
from tidegate.runtime.process import StartError
from tidegate.security.attestation import software
from tidegate.security.attestation.keys import read_key
from tidegate.security.attestation.measurement import Measurement
from tidegate.security.attestation.proof import key_hash, make_proof
from tidegate.security.attestation.verdict import NONCE_BYTES, Challenge
from tidegate.security.tls import Tls


class AttestationConfig(Section):
    """Evidence for gateways that require it of this process."""

    key: Path = Field(description="The attestation key, which `tidegate attest init` makes; it never leaves this host.")


class CannotAttest(ValueError):
    """There is no evidence; the message says why, for the gateway's operator."""


class Attester:
    """Answers challenges. `measure` returns the measurement of this process now."""

    def __init__(self, config: AttestationConfig, tls: Tls, measure: Callable[[], Measurement]) -> None:
        """Raises ConfigError: the key cannot be used."""
        self._key = read_key(config.key)
        self._tls = tls
        self._measure = measure
        self.key_id = software.key_id(self._key.public_key().public_bytes_raw())

    def answer(self, nonce: bytes, asker: bytes | None) -> bytes:
        """What to send.

        Args:
            asker: the certificate, PEM, that TLS has seen at the other end of the connection; None: there is none.

        Raises:
            CannotAttest: nothing can be bound to this connection.
        """
        if asker is None:
            raise CannotAttest("this connection shows no certificate, and evidence is bound to one")
        if len(nonce) != NONCE_BYTES:
            raise CannotAttest(f"a challenge has a nonce of {NONCE_BYTES} bytes, not {len(nonce)}")
        try:
            material = self._tls.fresh()
            certificate = x509.load_pem_x509_certificate(material.cert)
            key = serialization.load_pem_private_key(material.key, None)
            asker_key = key_hash(x509.load_pem_x509_certificate(asker))
        except (ValueError, TypeError) as error:
            raise CannotAttest(f"the certificates of this connection cannot be used: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CannotAttest("the TLS key is of no elliptic curve; `tidegate pki issue` makes one that is")
        challenge = Challenge(nonce, key_hash(certificate), asker_key)
        evidence = software.sign(self._key, self._measure(), challenge)
        return make_proof(software.KIND, evidence, challenge, certificate, key)

    def __repr__(self) -> str:
        return f"<Attester {self.key_id}>"


def attester_of(
    config: AttestationConfig | None, tls: Tls | None, measure: Callable[[], Measurement]
) -> Attester | None:
    """A process's attester; None without the section.

    Raises:
        StartError: the key cannot be used, or nothing is encrypted.
    """
    if config is None:
        return None
    if tls is None:
        raise StartError("key 'attestation' needs the section 'tls': evidence is bound to certificates")
    try:
        return Attester(config, tls, measure)
    except ConfigError as error:
        raise StartError(f"key 'attestation.key': {error}") from error

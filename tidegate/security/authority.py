"""The authority issues certificates; the contents and their reasons are below. Nothing here touches a file.

A private CA is trusted by every machine that was given its certificate, and its key lies on an operator's disk. So it
can do as little as possible: it signs no other CA (path length 0), and the only host names in its reach (its name
constraints) are those that no public host can have, and what was permitted when it was made. A thief of the key can
then impersonate the fleet, but no public site towards machines that trust this CA. Addresses are not constrained:
BoringSSL, and so gRPC, refuses any CA with such a constraint.

Certificates are short-lived, because there is no revocation list that every library here would read: a certificate that
is not renewed expires. A key is made anew with each certificate. P-256 and SHA-256, since each TLS library and each
small device can do them quickly; OpenSSL signs some 30,000 of these a second.

Validity begins five minutes ago: clocks of small devices are late.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tidegate.security.certificate_identity import CertificateIdentity, Role, identity_of

SKEW: Final = timedelta(minutes=5)
RENEW_SHARE: Final = 1 / 3  # of its validity: what is left when a certificate is due
# What no public host can be called (RFC 6761, 6762, 8375; .internal: ICANN, 2024); DOMAIN is below one of them.
PRIVATE_DOMAINS: Final = ("internal", "localhost", "local", "home.arpa", "test")
_LOOKS_NUMERIC: Final = re.compile(r"[0-9.]+")  # a mistyped address is no host name
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_USES: Final[dict[Role, list[x509.ObjectIdentifier]]] = {
    "gateway": [_SERVER, _CLIENT],  # callers dial it, it dials edges, pools and the broker
    "edge": [_SERVER, _CLIENT],  # gateways dial it, it dials the broker
    "pool": [_SERVER, _CLIENT],  # gateways dial it, it dials the broker where it announces itself
    "broker": [_SERVER],
    "client": [_CLIENT],
}


class PkiError(Exception):
    """Something that cannot be issued, or files that are no certificate authority; the message names the way out."""


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A certificate and its key, both as PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """The contents of one certificate."""

    identity: CertificateIdentity
    hosts: tuple[str, ...]  # DNS names and addresses beside the identity's own
    begins: datetime
    ends: datetime
    serial: int

    @property
    def renew_at(self) -> datetime:
        return self.ends - (self.ends - self.begins) * RENEW_SHARE

    def state(self, now: datetime) -> str:
        """`valid`, `due` for renewal, or `expired`."""
        return "expired" if now >= self.ends else "due" if now >= self.renew_at else "valid"


class Authority:
    """A CA's certificate and its key."""

    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.cert = cert
        self._key = key

    @classmethod
    def make(cls, name: str, *, valid: timedelta, now: datetime, permit: Sequence[str] = ()) -> Authority:
        """A new CA.

        Args:
            permit: domains that it may name beside private ones, with everything below them.

        Raises:
            PkiError: a permit is no domain.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        ski = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        cert = (
            _builder(subject, subject, key.public_key(), now, now + valid)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.NameConstraints(_permitted(permit), None), critical=True)
            .add_extension(ski, critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(cert, key)

    @classmethod
    def load(cls, pair: CertificatePair) -> Authority:
        """Raises ValueError for what is no certificate, no key, or no pair."""
        cert = x509.load_pem_x509_certificate(pair.cert)
        try:
            key = serialization.load_pem_private_key(pair.key, None)
        except TypeError as error:
            raise ValueError("its key is locked by a password") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
            raise ValueError("the key is not that of the certificate")
        return cls(cert, key)

    @property
    def pair(self) -> CertificatePair:
        return CertificatePair(self.cert.public_bytes(serialization.Encoding.PEM), _key_pem(self._key))

    def issue(
        self, identity: CertificateIdentity, hosts: Sequence[str], *, valid: timedelta, now: datetime
    ) -> CertificatePair:
        """A new certificate with a new key.

        Raises:
            PkiError: this CA may not name a host, or ends before the certificate would.
        """
        self._check(hosts, now + valid)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.common_name)])
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.host)]
        ca_ski = self.cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        cert = (
            _builder(subject, self.cert.subject, key.public_key(), now, now + valid)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_USES[identity.role]), critical=False)
            .add_extension(x509.SubjectAlternativeName([*names, *map(_general_name, hosts)]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_ski),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return CertificatePair(cert.public_bytes(serialization.Encoding.PEM), _key_pem(key))

    def _check(self, hosts: Sequence[str], ends: datetime) -> None:
        if ends > self.cert.not_valid_after_utc:
            last = f"{self.cert.not_valid_after_utc:%Y-%m-%d}"
            raise PkiError(f"the CA itself ends on {last}: ask for fewer --days, or make a new CA")
        permitted = self.cert.extensions.get_extension_for_class(x509.NameConstraints).value.permitted_subtrees or ()
        for name in map(_general_name, hosts):
            if isinstance(name, x509.DNSName) and not any(_is_below(one.value, name.value) for one in permitted):
                raise PkiError(
                    f"this CA may not name {name.value!r}: it was made for private hosts; make one that may with "
                    f"`tidegate pki init --permit {name.value}`"
                )

    def __repr__(self) -> str:
        return f"<Authority {self.cert.subject.rfc4514_string()} until {self.cert.not_valid_after_utc:%Y-%m-%d}>"


def validity(cert_pem: bytes) -> tuple[datetime, datetime]:
    """Return when a certificate begins and ends, as its peers see it. Raises ValueError: it is malformed."""
    cert = x509.load_pem_x509_certificate(cert_pem)
    return cert.not_valid_before_utc, cert.not_valid_after_utc


def read_issued(cert_pem: bytes) -> IssuedCertificate:
    """Read a certificate. Raises ValueError when Tidegate did not issue it."""
    cert = x509.load_pem_x509_certificate(cert_pem)
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError("it has no subject alternative names") from None
    identity = identity_of(names.get_values_for_type(x509.UniformResourceIdentifier))
    if identity is None:
        raise ValueError("it has no identity of the form tidegate://ROLE/NAME")
    dns = [name for name in names.get_values_for_type(x509.DNSName) if name != identity.host]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    begins = cert.not_valid_before_utc + SKEW
    return IssuedCertificate(identity, (*dns, *addresses), begins, cert.not_valid_after_utc, cert.serial_number)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - SKEW)
        .not_valid_after(ends)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _permitted(permit: Sequence[str]) -> list[x509.GeneralName]:
    return [*map(x509.DNSName, PRIVATE_DOMAINS), *map(_domain, permit)]


def _domain(text: str) -> x509.DNSName:
    name = _general_name(text.removeprefix("*").removeprefix("."))
    if not isinstance(name, x509.DNSName):
        raise PkiError(f"--permit {text}: addresses need no permit; name a domain")
    return name


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        if (
            not host
            or not all(label.strip("-") for label in host.split("."))
            or set(host) & set("/:*@ ")
            or _LOOKS_NUMERIC.fullmatch(host)
        ):
            raise ValueError
        return x509.DNSName(host.lower())
    except ValueError:
        raise PkiError(f"{host!r} is neither a host name nor an IP address") from None


def _is_below(domain: str, host: str) -> bool:
    return host == domain or host.endswith("." + domain)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

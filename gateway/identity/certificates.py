"""Client certificates: the identity of a certificate that TLS has verified already.

Trust is the listener's matter: it requests certificates and verifies them against its authorities, so a certificate
that arrives here is genuine. This module matches its names, in the configuration's order, against globs of their kind:
a DNS name is never taken for a URI that looks alike. A connection may outlive its certificate, so the end of validity
is checked for each request.

HTTP and gRPC give the same certificate in two forms; both come as DER, are parsed once, and are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Final

from cryptography import x509
from cryptography.x509.oid import NameOID

from gateway.config.auth import MtlsConfig
from gateway.identity.credential import UnprovedCredential
from tidegate.caller import Identity

REMEMBERED: Final = 4096


class Certificates:
    """Identifies callers by certificate. Mutable: the certificates that were parsed."""

    def __init__(self, config: MtlsConfig) -> None:
        self._entries = [(entry.name, entry.grant) for entry in config.certificates]
        self._known: OrderedDict[bytes, Identity | None] = OrderedDict()

    def identify(self, der: bytes, utc_s: float) -> Identity:
        """Return the identity of a certificate. Raises UnprovedCredential."""
        if der not in self._known:
            self._known[der] = self._read(der)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        found = self._known[der]
        if found is None:
            raise UnprovedCredential("the client certificate names nobody who is known here", "unknown")
        if utc_s >= found.expires_at:
            raise UnprovedCredential("the client certificate has expired", "expired", found.id)
        return found

    def _read(self, der: bytes) -> Identity | None:
        try:
            certificate = x509.load_der_x509_certificate(der)
            names = list(certificate_names(certificate))
        except ValueError:
            return None
        for pattern, grant in self._entries:
            name = next((one for one in names if fnmatchcase(one, pattern)), None)
            if name is not None:
                return Identity(f"cert:{name}", grant, certificate.not_valid_after_utc.timestamp())
        return None

    def __repr__(self) -> str:
        return f"<Certificates {len(self._entries)} entries, {len(self._known)} remembered>"


def certificate_names(certificate: x509.Certificate) -> Iterator[str]:
    """Yield a certificate's names as KIND:NAME, alternative names first. Raises ValueError: it is malformed."""
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        pass
    else:
        for kind, prefix in (
            (x509.DNSName, "dns"),
            (x509.UniformResourceIdentifier, "uri"),
            (x509.RFC822Name, "email"),
        ):
            yield from (f"{prefix}:{name}" for name in alternatives.get_values_for_type(kind))
    for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME):
        yield f"cn:{attribute.value!s}"

"""A CA for a test, and the `tls` sections of whoever the test lets it sign for."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tidegate import clock
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.certificate_store import PkiStore
from tidegate.security.tls import Tls, TlsConfig

HOSTS = ("localhost", "127.0.0.1")


class FleetPki:
    """A CA in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.store = PkiStore(folder)
        self.store.init("test", days=3650, now=_now() - timedelta(days=400))

    def config(self, who: str, *, ended: bool = False, **keys: Any) -> TlsConfig:
        """The section of one with a new certificate; `ended`: one that was good until yesterday."""
        self.issue(who, ended=ended)
        identity = CertificateIdentity.parse(who)
        return TlsConfig(cert=self.store.cert(identity), key=self.store.key(identity), ca=self.store.ca_cert, **keys)

    def issue(self, who: str, *, ended: bool = False) -> int:
        """A new certificate in its place; its serial number."""
        begins = _now() - timedelta(days=31 if ended else 0)
        return self.store.issue(CertificateIdentity.parse(who), HOSTS, days=30, now=begins).serial

    def ending_in(self, who: str, seconds: float) -> Tls:
        """The TLS of one whose certificate is good for no longer than this."""
        begins = _now() - timedelta(days=1) + timedelta(seconds=seconds)
        identity = CertificateIdentity.parse(who)
        self.store.issue(identity, HOSTS, days=1, now=begins)
        return Tls(TlsConfig(cert=self.store.cert(identity), key=self.store.key(identity), ca=self.store.ca_cert))

    def tls(self, who: str, **keys: Any) -> Tls:
        return Tls(self.config(who, **keys))

    def client(self, who: str | None = None, **keys: Any) -> ssl.SSLContext:
        """The context of a client that trusts this CA and shows `who`'s certificate, or none."""
        context = ssl.create_default_context(cafile=str(self.store.ca_cert))
        if who is not None:
            section = self.config(who, **keys)
            context.load_cert_chain(section.cert, section.key)
        return context

    def __repr__(self) -> str:
        return f"<FleetPki {self.store.folder}>"


def serial_shown(address: str, context: ssl.SSLContext) -> int:
    """The serial number of the certificate that a server at HOST:PORT shows to a new connection."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        cert = secure.getpeercert()
        assert cert is not None
        return int(str(cert["serialNumber"]), 16)


def _now() -> datetime:
    return datetime.fromtimestamp(clock.utc_s(), UTC)

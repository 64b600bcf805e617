"""A scripted server over TLS, with a certificate for 127.0.0.1 alone."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from tests.support.upstreams.scripted_server import ScriptedServer, served
from tidegate import clock
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.certificate_store import PkiStore


@asynccontextmanager
async def tls_served(server: ScriptedServer, folder: Path) -> AsyncIterator[tuple[str, Path]]:
    """Its address, and the file of the CA."""
    now = datetime.fromtimestamp(clock.utc_s(), UTC)
    store = PkiStore(folder / "pki")
    store.init("test", days=30, now=now)
    identity = CertificateIdentity.parse("pool/up")
    store.issue(identity, ("127.0.0.1",), days=1, now=now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(store.cert(identity), store.key(identity))
    async with served(server, tls=context) as url:
        yield url.replace("http://", "https://"), store.ca_cert

"""The section `store`: what is refused, in words that name the key and the way out; and a store over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.config.store import SharedStoreConfig
from gateway.store.quota_leaser import LEASE
from gateway.store.shared_store import SharedStore, StoreUnavailable
from tests.support.stores import REDIS, RedisServer
from tidegate import clock


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"url": "http://store:6379"}, "is not a store's address; it reads like redis://host:6379"),
        ({"url": "redis://127.0.0.1:6379/x"}, "the number of a database, not 'x'"),
        ({"url": "redis://127.0.0.1:99999"}, "has no port from 1 to 65535"),
        ({"url": "redis://127.0.0.1?ssl=no"}, "options of the store are keys of their own"),
        ({"url": "redis://store.example"}, "use rediss://, or plain_text: true"),
        ({"url": "redis://127.0.0.1", "ca": "ca.pem"}, "need rediss:// in store.url"),
        ({"url": "rediss://store", "cert": "cert.pem"}, "belong together"),
        ({"url": "rediss://:secret@store", "password_file": "p"}, "two passwords"),
        ({"url": "redis://127.0.0.1", "lease_ms": 50}, "greater than or equal to 100"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(words: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SharedStoreConfig(**words)
    assert says in str(refused.value)


def test_a_password_is_in_no_address_that_is_shown() -> None:
    section = SharedStoreConfig(url="rediss://gateways:s%40cret@store.local:6390/2")
    assert section.public == "rediss://store.local:6390/2" and "cret" not in repr(SharedStore(section, "site", float))
    assert (section.address, section.username, section.password()) == (("store.local", 6390, 2), "gateways", "s@cret")


def certificates(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine, which is its own CA, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=store", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(cert),
        *subject,
    ]
    subprocess.run(made, check=True, capture_output=True, timeout=60.0)
    return cert, key


@pytest.mark.slow
@pytest.mark.skipif(REDIS is None or shutil.which("openssl") is None, reason="redis-server or openssl is not installed")
async def test_over_tls_the_stores_certificate_must_come_from_the_ca(tmp_path: Path) -> None:
    cert, key = certificates(tmp_path)
    files = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(cert)]
    store = RedisServer(tmp_path, "--requirepass", "secret", "--tls-auth-clients", "no", *files)
    store.options += ("--tls-port", str(store.port), "--port", "0")
    with store:
        url, figures = f"rediss://:secret@127.0.0.1:{store.port}", ["main", "", 2000, 256]
        keys = ["tidegate:{site}:leasers", "tidegate:{site}:spending"]
        section = SharedStoreConfig(url=url, ca=cert, timeout_ms=5000)
        async with SharedStore(section, "site", lambda: 0.5) as trusted:
            names, _, lent = await trusted.run(LEASE, keys, figures)
            assert (names, lent) == ([b"main"], [])
        async with SharedStore(SharedStoreConfig(url=url, timeout_ms=5000), "site", lambda: 0.5) as stranger:
            with pytest.raises(StoreUnavailable, match="certificate"):
                await stranger.run(LEASE, keys, figures)


@pytest.mark.slow
@pytest.mark.skipif(REDIS is None or shutil.which("openssl") is None, reason="redis-server or openssl is not installed")
async def test_a_ca_that_was_renewed_is_read_again_after_a_failed_handshake(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    store = RedisServer(tmp_path, "--tls-auth-clients", "no")

    def serves(folder: Path) -> Path:
        folder.mkdir()
        cert, key = certificates(folder)
        files = ("--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(cert))
        store.options = ("--tls-auth-clients", "no", *files, "--tls-port", str(store.port), "--port", "0")
        return cert

    ca.write_bytes(serves(tmp_path / "first").read_bytes())
    keys, figures = ["tidegate:{site}:leasers", "tidegate:{site}:spending"], ["main", "", 2000, 256]
    section = SharedStoreConfig(url=f"rediss://127.0.0.1:{store.port}", ca=ca, timeout_ms=5000)
    with store:
        async with SharedStore(section, "site", lambda: 0.5) as trusting:
            assert (await trusting.run(LEASE, keys, figures))[0] == [b"main"]
            store.kill()
            renewed = serves(tmp_path / "second")
            store.start()
            async with asyncio.timeout(60.0):
                while "certificate" not in (trusting.trouble or ""):
                    with pytest.raises(StoreUnavailable):
                        await trusting.run(LEASE, keys, figures)
                    await clock.sleep(0.05)
                ca.write_bytes(renewed.read_bytes())
                while trusting.trouble is not None:
                    with contextlib.suppress(StoreUnavailable):
                        await trusting.run(LEASE, keys, figures)
                    await clock.sleep(0.05)

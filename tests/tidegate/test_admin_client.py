"""What the client of the admin port says where no answer comes."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from tests.support.certificates import HOSTS, FleetPki
from tidegate.admin_client import Admin, AdminError


async def _asked(pki: FleetPki, folder: Path, address: str, patch: pytest.MonkeyPatch, ca: Path) -> str:
    """The error of a client that believes `ca` and calls a server with a certificate for `HOSTS` at the address."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    config = pki.config("gateway/main")
    context.load_cert_chain(config.cert, config.key)
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        patch.setenv("SSL_CERT_FILE", str(ca))
        with pytest.raises(AdminError) as refused:
            await asyncio.to_thread(Admin(f"https://{address}:{port}").read, "/v1/fleet")
    return refused.value.message


async def test_a_certificate_for_another_name_is_told_with_the_names_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = FleetPki(tmp_path / "pki")
    words = await _asked(pki, tmp_path, "127.0.0.2.nip.invalid", monkeypatch, pki.store.ca_cert)
    assert "no gateway answers" in words, "a name that resolves to nothing is no matter of certificates"
    words = await _asked(pki, tmp_path, "[::ffff:127.0.0.1]", monkeypatch, pki.store.ca_cert)
    assert all(host in words for host in HOSTS)
    assert "and not for ::ffff:127.0.0.1" in words
    assert f"--admin https://{HOSTS[0]}:" in words
    assert "SSL_CERT_FILE" not in words


async def test_a_certificate_of_an_unknown_authority_is_told_with_the_variable_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FleetPki(tmp_path / "other")
    words = await _asked(FleetPki(tmp_path / "pki"), tmp_path, "127.0.0.1", monkeypatch, other.store.ca_cert)
    assert "is not trusted" in words
    assert "SSL_CERT_FILE names the CA's certificate" in words


async def test_an_answer_that_breaks_off_is_the_gateways_error_and_a_full_disk_is_not() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\none\n")
        writer.close()

    def whole(admin: Admin) -> None:
        with admin.answer("/") as answer:
            answer.read()

    def stored(admin: Admin) -> None:
        with admin.answer("/") as answer:
            assert next(iter(answer)) == b"one\n"
            raise OSError(28, "No space left on device")

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    async with server:
        admin = Admin(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(AdminError, match="broke off"):
            await asyncio.to_thread(whole, admin)
        with pytest.raises(OSError, match="No space left"):
            await asyncio.to_thread(stored, admin)

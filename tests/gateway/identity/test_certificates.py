"""Client certificates over real TLS: HTTP and gRPC read the same identity from the same certificate."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from gateway.app import Gateway
from gateway.config.auth import MtlsConfig
from gateway.identity.certificates import Certificates
from gateway.identity.credential import UnprovedCredential
from tests.support.certificates import FleetPki
from tests.support.gateway.app import configured
from tests.support.gateway.guarded import keys_in

METADATA = "/inference.GRPCInferenceService/ServerMetadata"


class Ca:
    """An authority of callers, and the certificates that it signs."""

    def __init__(self, folder: Path, name: str = "callers") -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._signed(self.name, self.key, [], authority=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self.certificate.public_bytes(Encoding.PEM))

    def issue(self, *names: x509.GeneralName, cn: str = "") -> tuple[x509.Certificate, Any]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, cn)] if cn else [])
        return self._signed(subject, key, list(names)), key

    def files(self, *names: x509.GeneralName, cn: str = "") -> tuple[Path, Path]:
        certificate, key = self.issue(*names, cn=cn)
        cert_path, key_path = (self.folder / f"{certificate.serial_number}.{end}" for end in ("pem", "key"))
        cert_path.write_bytes(certificate.public_bytes(Encoding.PEM))
        key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return cert_path, key_path

    def _signed(
        self, subject: x509.Name, key: Any, names: list[x509.GeneralName], *, authority: bool = False
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(authority, None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=not subject.rdns)
        return builder.sign(self.key, SHA256())


RULES: list[dict[str, Any]] = [
    {"name": "uri:spiffe://fleet/clinic/*", "tenant": "clinic", "models": ["echo"]},
    {"name": "dns:*.batch.example", "tenant": "batch", "highest_priority": 3, "max_in_flight": 2},
    {"name": "email:ann@example.org", "tenant": "ann"},
    {"name": "cn:ops", "tenant": "ops", "rights": ["admin"]},
]
KNOWN = Certificates(MtlsConfig(certificates=RULES))  # type: ignore[arg-type]


def der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.DER)


@pytest.mark.parametrize(
    ("names", "cn", "who"),
    [
        ([x509.UniformResourceIdentifier("spiffe://fleet/clinic/7")], "", "clinic"),
        ([x509.DNSName("a.batch.example")], "ignored", "batch"),
        ([x509.RFC822Name("ann@example.org")], "", "ann"),
        ([], "ops", "ops"),
        ([x509.DNSName("x.example"), x509.DNSName("b.batch.example")], "", "batch"),
        ([x509.DNSName("b.batch.example")], "ops", "batch"),  # the first entry that fits
    ],
)
def test_a_certificate_belongs_to_the_tenant_of_the_first_entry_that_fits(
    tmp_path: Path, names: list[x509.GeneralName], cn: str, who: str
) -> None:
    certificate, _ = Ca(tmp_path).issue(*names, cn=cn)
    found = KNOWN.identify(der(certificate), datetime.now(UTC).timestamp())
    assert found.tenant == who
    assert KNOWN.identify(der(certificate), datetime.now(UTC).timestamp()) is found


@pytest.mark.parametrize(
    ("names", "cn"),
    [
        ([], "spiffe://fleet/clinic/7"),  # a name of another kind that looks alike
        ([x509.DNSName("spiffe.fleet.clinic")], ""),
        ([x509.DNSName("batch.example")], ""),
        ([x509.DNSName("ops")], "somebody"),
        ([], ""),
    ],
)
def test_names_of_another_kind_count_for_nothing(tmp_path: Path, names: list[x509.GeneralName], cn: str) -> None:
    certificate, _ = Ca(tmp_path).issue(*names, cn=cn)
    with pytest.raises(UnprovedCredential, match="names nobody who is known here"):
        KNOWN.identify(der(certificate), 0.0)


def test_bytes_that_are_no_certificate_have_no_identity() -> None:
    with pytest.raises(UnprovedCredential):
        KNOWN.identify(b"\x30\x03nope", 0.0)


def test_a_connection_that_outlives_its_certificate_is_refused(tmp_path: Path) -> None:
    certificate, _ = Ca(tmp_path).issue(cn="ops")
    ends = certificate.not_valid_after_utc.timestamp()
    assert KNOWN.identify(der(certificate), ends - 1).id == "cert:cn:ops"
    with pytest.raises(UnprovedCredential, match="has expired"):
        KNOWN.identify(der(certificate), ends)
    assert repr(KNOWN).startswith("<Certificates 4 entries")


# Over real connections


@asynccontextmanager
async def serving(folder: Path, *, required: bool) -> AsyncIterator[tuple[Gateway, Ca, FleetPki]]:
    pki, callers = FleetPki(folder / "pki"), Ca(folder)
    tls = pki.config("gateway/main", client_ca=callers.path, require_client_cert=required)
    auth = {"keys_file": keys_in(folder).path, "mtls": {"certificates": RULES}}
    async with Gateway(configured(folder, tls=tls, auth=auth)) as gateway:
        yield gateway, callers, pki


def context(pki: FleetPki, pair: tuple[Path, Path] | None) -> ssl.SSLContext:
    found = ssl.create_default_context(cafile=str(pki.store.ca_cert))
    if pair is not None:
        found.load_cert_chain(*pair)
    return found


async def over_http(gateway: Gateway, made: ssl.SSLContext, model: str = "echo") -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{gateway.addresses['http']}/v2/models/{model}", ssl=made) as response,
    ):
        return response.status


async def over_grpc(gateway: Gateway, pki: FleetPki, pair: tuple[Path, Path] | None) -> str:
    cert, key = (None, None) if pair is None else (path.read_bytes() for path in pair)
    credentials = grpc.ssl_channel_credentials(pki.store.ca_cert.read_bytes(), key, cert)
    async with grpc.aio.secure_channel(gateway.addresses["grpc"], credentials) as channel:
        try:
            await channel.unary_unary(METADATA)(b"", timeout=30.0)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


@pytest.mark.slow
async def test_over_http_a_certificate_is_as_good_as_a_key(tmp_path: Path) -> None:
    async with serving(tmp_path, required=False) as (gateway, callers, pki):
        clinic = callers.files(x509.UniformResourceIdentifier("spiffe://fleet/clinic/7"))
        assert await over_http(gateway, context(pki, clinic)) == 200
        assert await over_http(gateway, context(pki, clinic), "other") == 403
        assert await over_http(gateway, context(pki, callers.files(cn="stranger"))) == 401
        assert await over_http(gateway, context(pki, None)) == 401
        assert "clinic" in gateway.admission.tenants.quotas

        forged = Ca(tmp_path, "impostor").files(x509.UniformResourceIdentifier("spiffe://fleet/clinic/7"))
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, OSError)):
            await over_http(gateway, context(pki, forged))


@pytest.mark.slow
async def test_over_grpc_too(tmp_path: Path) -> None:
    async with serving(tmp_path, required=True) as (gateway, callers, pki):
        batch = callers.files(x509.DNSName("a.batch.example"))
        assert await over_grpc(gateway, pki, batch) == "OK"
        assert await over_grpc(gateway, pki, callers.files(cn="stranger")) == "UNAUTHENTICATED"
        assert await over_grpc(gateway, pki, None) == "UNAVAILABLE"
        forged = Ca(tmp_path, "impostor").files(x509.DNSName("a.batch.example"))
        assert await over_grpc(gateway, pki, forged) == "UNAVAILABLE"


@pytest.mark.slow
def test_on_the_loop_that_gateways_run_on_as_well(tmp_path: Path) -> None:
    async def there_and_back() -> int:
        async with serving(tmp_path, required=False) as (gateway, callers, pki):
            return await over_http(gateway, context(pki, callers.files(x509.DNSName("a.batch.example"))))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(there_and_back()) == 200

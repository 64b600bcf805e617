"""Certificates of a CA, checked by the verifier of `cryptography`, and by `tidegate pki` as operators use it."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from tidegate import clock
from tidegate.security.authority import Authority, CertificatePair, PkiError, read_issued
from tidegate.security.certificate_identity import ROLES, CertificateIdentity
from tidegate.security.certificate_store import PkiStore
from tidegate.storage.atomic_file import write_atomically
from tidegate.tools.pki_cli import pki

NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
EDGE = CertificateIdentity("edge", "edge-1")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make("test", valid=3650 * DAY, now=NOW)


def verified(authority: Authority, cert: x509.Certificate, host: str, now: datetime) -> list[x509.Certificate]:
    """The chain that an independent verifier finds; raises VerificationError where there is none."""
    builder = PolicyBuilder().store(Store([authority.cert])).time(now)
    return builder.build_server_verifier(x509.DNSName(host)).verify(cert, [])


def test_a_certificate_is_good_for_its_host_and_its_identity_while_it_lives(authority: Authority) -> None:
    pair = authority.issue(EDGE, ["device-1.local", "10.0.0.7"], valid=90 * DAY, now=NOW)
    cert = x509.load_pem_x509_certificate(pair.cert)
    for host in ("device-1.local", EDGE.host):
        assert len(verified(authority, cert, host, NOW + DAY)) == 2
    assert len(verified(authority, cert, EDGE.host, NOW - timedelta(minutes=4))) == 2  # a clock that is late
    for host, at in (("device-2.local", NOW), (EDGE.host, NOW + 91 * DAY), (EDGE.host, NOW - DAY)):
        with pytest.raises(VerificationError):
            verified(authority, cert, host, at)


def test_another_authoritys_certificate_is_not_good(authority: Authority) -> None:
    stranger = Authority.make("test", valid=3650 * DAY, now=NOW)
    cert = x509.load_pem_x509_certificate(stranger.issue(EDGE, [], valid=DAY, now=NOW).cert)
    with pytest.raises(VerificationError):
        verified(authority, cert, EDGE.host, NOW)


class Unchecked(Authority):
    """A stolen key in the hands of a thief, whose program checks nothing before it signs."""

    def _check(self, hosts: Sequence[str], ends: datetime) -> None:
        pass


def test_a_stolen_ca_key_names_no_public_host(authority: Authority) -> None:
    forged = Unchecked.load(authority.pair)
    cert = x509.load_pem_x509_certificate(forged.issue(EDGE, ["bank.example"], valid=DAY, now=NOW).cert)
    with pytest.raises(VerificationError):
        verified(authority, cert, "bank.example", NOW)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_use_its_certificate_for_what_it_does_and_nothing_else(authority: Authority, role: str) -> None:
    cert = x509.load_pem_x509_certificate(
        authority.issue(CertificateIdentity.parse(f"{role}/x"), [], valid=DAY, now=NOW).cert
    )
    uses = set(cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert (ExtendedKeyUsageOID.SERVER_AUTH in uses) == (role != "client")
    assert (ExtendedKeyUsageOID.CLIENT_AUTH in uses) == (role in ("gateway", "edge", "pool", "client"))
    assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not cert.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_what_was_issued_can_be_read_back(authority: Authority) -> None:
    hosts = ("device-1.local", "10.0.0.7", "fd00::7")
    issued = read_issued(authority.issue(EDGE, hosts, valid=90 * DAY, now=NOW).cert)
    assert (issued.identity, issued.hosts, issued.begins, issued.ends) == (EDGE, hosts, NOW, NOW + 90 * DAY)
    assert issued.renew_at == NOW + 60 * DAY
    states = [issued.state(NOW + days * DAY) for days in (0, 59, 60, 89, 90)]
    assert states == ["valid", "valid", "due", "due", "expired"]


@pytest.mark.parametrize(
    ("hosts", "days", "way_out"),
    [
        (["gateway.example.com"], 1, "--permit gateway.example.com"),
        (["notlocal"], 1, "--permit notlocal"),
        (["http://x.local"], 1, "neither a host name nor an IP address"),
        (["10.0.0"], 1, "neither a host name nor an IP address"),
        ([""], 1, "neither a host name nor an IP address"),
        ([], 4000, "fewer --days"),
    ],
)
def test_what_cannot_be_issued_is_refused_with_the_way_out(
    authority: Authority, hosts: list[str], days: int, way_out: str
) -> None:
    with pytest.raises(PkiError, match=way_out):
        authority.issue(EDGE, hosts, valid=days * DAY, now=NOW)


def test_permitted_domains_hold_what_is_below_them_and_nothing_that_only_ends_alike() -> None:
    wide = Authority.make("test", valid=10 * DAY, now=NOW, permit=["*.example.com"])
    cert = x509.load_pem_x509_certificate(wide.issue(EDGE, ["a.example.com"], valid=DAY, now=NOW).cert)
    assert verified(wide, cert, "a.example.com", NOW)
    with pytest.raises(PkiError, match=r"badexample\.com"):
        wide.issue(EDGE, ["badexample.com"], valid=DAY, now=NOW)
    with pytest.raises(PkiError, match="addresses need no permit"):
        Authority.make("test", valid=DAY, now=NOW, permit=["10.0.0.1"])


def test_a_key_that_is_not_the_certificates_is_no_ca(authority: Authority) -> None:
    other = Authority.make("test", valid=DAY, now=NOW)
    with pytest.raises(ValueError, match="not that of the certificate"):
        Authority.load(CertificatePair(authority.pair.cert, other.pair.key))


# -- the command ---------------------------------------------------------------------------------------------------

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`tidegate pki …` in a folder of its own; `at` is the day that it is."""

    def invoke(*words: str, at: float = 0) -> Result:
        monkeypatch.setattr(clock, "utc_s", (NOW + at * DAY).timestamp)
        return CliRunner(env={"COLUMNS": "160"}).invoke(pki, [*words, "--dir", str(tmp_path / "pki")])

    return invoke


def test_keys_are_for_their_owner_only(run: Run, tmp_path: Path) -> None:
    assert run("init").exit_code == 0
    assert run("issue", "edge/edge-1", "--host", "10.0.0.7").exit_code == 0
    modes = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("*") if path.is_file()
    }  # fmt: skip
    assert modes == {
        "pki/ca.key": 0o600, "pki/ca.crt": 0o644, "pki/edge/edge-1.key": 0o600, "pki/edge/edge-1.crt": 0o644
    }  # fmt: skip


def test_a_second_ca_does_not_take_the_place_of_the_first(run: Run, tmp_path: Path) -> None:
    run("init")
    before = (tmp_path / "pki" / "ca.key").read_bytes()
    again = run("init")
    assert again.exit_code == 1 and "holds a CA already" in again.output
    assert (tmp_path / "pki" / "ca.key").read_bytes() == before


@pytest.mark.parametrize("words", [("issue", "edge/edge-1"), ("renew",), ("show",)])
def test_without_a_ca_the_error_names_the_command_that_makes_one(run: Run, words: tuple[str, ...]) -> None:
    answer = run(*words)
    assert answer.exit_code == 1
    assert "`tidegate pki init`" in answer.output


def test_renewal_takes_those_in_the_last_third_of_their_life_and_keeps_what_they_were(run: Run, tmp_path: Path) -> None:
    store = PkiStore(tmp_path / "pki")
    run("init")
    run("issue", "edge/short", "--days", "30", "--host", "10.0.0.7")
    run("issue", "edge/long", "--days", "90")
    key_before = store.key(CertificateIdentity("edge", "short")).read_bytes()
    assert run("renew", at=19).output == "nothing is due\n"
    assert run("renew", at=21).output == "renewed edge/short, until 2030-06-21\n"
    short = next(one.issued for one in store.held() if one.path.stem == "short")
    assert short is not None and short.hosts == ("10.0.0.7",) and short.ends == NOW + 51 * DAY
    assert store.key(short.identity).read_bytes() != key_before
    assert run("renew", at=21).output == "nothing is due\n"


def test_renewal_by_name_is_only_of_that_name_and_unknown_names_are_errors(run: Run) -> None:
    run("init")
    run("issue", "edge/a")
    run("issue", "edge/b")
    assert run("renew", "edge/a", "--force").output == "renewed edge/a, until 2030-07-30\n"
    missing = run("renew", "edge/c")
    assert missing.exit_code == 1 and "no certificate of edge/c" in missing.output


def test_show_tells_each_certificates_state_and_files_in_a_wrong_place(run: Run, tmp_path: Path) -> None:
    run("init")
    run("issue", "edge/edge-1", "--days", "30", "--host", "10.0.0.7")
    run("issue", "client/reports")
    told = json.loads(run("show", "--json", at=25).stdout)
    assert [(one["identity"], one["state"]) for one in told["certificates"]] == [
        ("edge/edge-1", "due"),
        ("client/reports", "valid"),
    ]
    folder = tmp_path / "pki" / "edge"
    (folder / "edge-2.crt").write_bytes((folder / "edge-1.crt").read_bytes())
    (folder / "junk.crt").write_text("junk")
    table = run("show", at=31).output
    assert "expired" in table and table.count("unusable") == 2


def test_a_key_pair_goes_both_into_place_or_leaves_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "file"
    write_atomically(place, b"old", mode=0o600)
    with pytest.raises(TypeError):
        write_atomically(place, "no bytes", mode=0o600)  # type: ignore[arg-type]
    assert place.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_encrypted_or_foreign_key_is_an_error_in_plain_words(run: Run, tmp_path: Path) -> None:
    run("init")
    pair = Authority.make("x", valid=DAY, now=NOW).pair
    key = serialization.load_pem_private_key(pair.key, None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    )
    for content in (locked, b"junk"):
        (tmp_path / "pki" / "ca.key").write_bytes(content)
        answer = run("show")
        assert answer.exit_code == 1 and "holds no usable CA" in answer.output

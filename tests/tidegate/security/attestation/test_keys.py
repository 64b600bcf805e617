"""Attestation keys on disk: made once, for their owner's eyes, and allowed by a line that can be read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tidegate.config import ConfigError
from tidegate.runtime.process import StartError
from tidegate.security.attestation.attester import AttestationConfig, attester_of
from tidegate.security.attestation.keys import line_of, make_key, read_allowed, read_key
from tidegate.security.attestation.measurement import Measurement
from tidegate.security.attestation.software import key_id
from tidegate.tools.attest_cli import attest


def public(path: Path) -> bytes:
    return read_key(path).public_key().public_bytes_raw()


def test_the_printed_line_allows_the_key_that_was_made(tmp_path: Path) -> None:
    made = CliRunner().invoke(attest, ["init", str(tmp_path / "keys" / "one.key")])
    shown = CliRunner().invoke(attest, ["show", str(tmp_path / "keys" / "one.key")])
    assert made.exit_code == shown.exit_code == 0
    assert made.stdout == shown.stdout and made.stdout.endswith(" one.key\n")
    allowed = tmp_path / "allowed"
    allowed.write_text(f"# the fleet's\n\n{made.stdout}{line_of(make_key(tmp_path / 'two.key'), '')}  # the second\n")
    one, two = public(tmp_path / "keys" / "one.key"), public(tmp_path / "two.key")
    assert read_allowed(allowed) == {key_id(one): one, key_id(two): two}
    listed = CliRunner().invoke(attest, ["list", str(allowed)])
    assert listed.stdout.split() == [key_id(one), key_id(two)]
    assert json.loads(CliRunner().invoke(attest, ["list", "--json", str(allowed)]).stdout) == listed.stdout.split()


def test_a_key_is_for_its_owner_only_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "one.key"
    make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="is not replaced"):
        make_key(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(path)
    again = CliRunner().invoke(attest, ["init", str(path)])
    assert again.exit_code == 1 and "exists" in again.output


def test_what_is_no_key_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "one.key"
    with pytest.raises(ConfigError, match=r"`tidegate attest init .*one.key` makes one"):
        read_key(path)
    path.touch(0o600)
    path.write_text("junk")
    with pytest.raises(ConfigError, match="is no attestation key"):
        read_key(path)
    foreign = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(
        foreign.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    with pytest.raises(ConfigError, match="not of Ed25519"):
        read_key(path)
    assert CliRunner().invoke(attest, ["show", str(path)]).exit_code == 1


@pytest.mark.parametrize("line", ["ed25519", "ed25519 AAAA", "rsa " + "A" * 44, "ed25519 @@", "x", "\udcff\x00"])
def test_a_line_that_is_no_key_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "allowed"
    path.write_bytes(b"# fine\n" + line.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="allowed:2: not a line as `tidegate attest show` prints it"):
        read_allowed(path)
    assert CliRunner().invoke(attest, ["list", str(path)]).exit_code == 1


def test_a_list_that_others_may_write_or_that_has_no_end_allows_no_key(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    path.write_text("#")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="others than its owner may write"):
        read_allowed(path)
    path.chmod(0o600)
    path.write_text("#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_allowed(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_allowed(tmp_path / "none")


def test_evidence_without_encryption_is_found_at_the_start(tmp_path: Path) -> None:
    make_key(tmp_path / "one.key")
    with pytest.raises(StartError, match="'attestation' needs the section 'tls'"):
        attester_of(AttestationConfig(key=tmp_path / "one.key"), None, lambda: Measurement("1", ()))
    assert attester_of(None, None, lambda: Measurement("1", ())) is None

"""`tidegate keys signing`: a private key for the operator, and the public line that makes devices trust it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.commands.keys import keys
from tidegate.config import ConfigError
from tidegate.rollout.desired import DesiredDocument
from tidegate.rollout.signing import sign_document, verify_document
from tidegate.security.attestation.keys import read_allowed, read_key


def test_a_signature_of_a_new_key_is_accepted_with_its_public_line(tmp_path: Path) -> None:
    made = CliRunner().invoke(keys, ["signing", "create", "operator", "--dir", str(tmp_path)])
    assert made.exit_code == 0, made.output

    private = tmp_path / "operator.key"
    assert private.stat().st_mode & 0o777 == 0o600
    message = sign_document(DesiredDocument(1, 0, device="edge-1"), [read_key(private)])
    assert verify_document(message, read_allowed(tmp_path / "operator.pub"))[0].device == "edge-1"
    shown = CliRunner().invoke(keys, ["signing", "show", str(private)])
    assert shown.output == (tmp_path / "operator.pub").read_text()
    assert "signing-key-created" in (tmp_path / "operator.audit.jsonl").read_text()


def test_a_key_is_not_replaced_and_its_name_is_no_path(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert run(keys, ["signing", "create", "operator", "--dir", str(tmp_path)]).exit_code == 0

    again = run(keys, ["signing", "create", "operator", "--dir", str(tmp_path)])
    assert isinstance(again.exception, ConfigError)
    assert run(keys, ["signing", "create", "../x", "--dir", str(tmp_path)]).exit_code == 2


def test_a_key_that_others_may_read_is_refused_in_words_that_help(tmp_path: Path) -> None:
    CliRunner().invoke(keys, ["signing", "create", "operator", "--dir", str(tmp_path)])
    (tmp_path / "operator.key").chmod(0o644)

    with pytest.raises(ConfigError, match=r"the signing key .* chmod 600"):
        read_key(tmp_path / "operator.key", "signing key")

"""`tidegate pki`, where a file is damaged or a folder cannot be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tidegate.storage.atomic_file import write_atomically
from tidegate.tools.pki_cli import pki


def run(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(pki, [words[0], "--dir", str(folder), *words[1:]])


def test_a_certificate_that_cannot_be_read_is_told_by_the_daily_renewal(tmp_path: Path) -> None:
    for words in (("init",), ("issue", "edge/kiosk-7"), ("issue", "edge/kiosk-8")):
        assert run(tmp_path, *words).exit_code == 0
    assert run(tmp_path, "renew").output == "nothing is due\n"
    damaged = tmp_path / "edge" / "kiosk-7.crt"
    damaged.write_bytes(b"")
    result = run(tmp_path, "renew", "--force")
    assert result.exit_code == 1 and "renewed edge/kiosk-8" in result.output
    assert str(damaged) in result.output and "`tidegate pki issue`" in result.output
    assert run(tmp_path, "issue", "edge/kiosk-7").exit_code == 0 == run(tmp_path, "renew").exit_code


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    result = run(tmp_path / "pki", "init")
    assert result.exit_code == 1 and "cannot write" in result.output


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "pki").write_text("")
    result = run(tmp_path / "pki" / "deeper", "init")
    assert result.exit_code == 1 and f"cannot write {tmp_path / 'pki'}" in result.output


def test_an_init_that_was_cut_short_is_done_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_after_the_key(path: Path, content: bytes, **options: Any) -> None:
        if path.suffix == ".crt":
            raise OSError(28, "No space left on device", str(path))
        write_atomically(path, content, **options)

    with monkeypatch.context() as patched:
        patched.setattr("tidegate.security.certificate_store.write_atomically", full_after_the_key)
        result = run(tmp_path, "init")
    assert result.exit_code == 1 and f"cannot write {tmp_path / 'ca.crt'}: No space left" in result.output
    assert os.listdir(tmp_path) == ["ca.key"]

    assert run(tmp_path, "init").exit_code == 0
    assert run(tmp_path, "issue", "edge/kiosk-7").exit_code == 0, "key and certificate fit"


def test_a_ca_whose_certificate_was_lost_is_not_made_anew_over_what_it_issued(tmp_path: Path) -> None:
    for words in (("init",), ("issue", "edge/kiosk-7")):
        assert run(tmp_path, *words).exit_code == 0
    key = (tmp_path / "ca.key").read_bytes()
    (tmp_path / "ca.crt").unlink()
    result = run(tmp_path, "init")
    assert result.exit_code == 1 and "copy it from a machine that has it" in result.output
    assert (tmp_path / "ca.key").read_bytes() == key

"""Secrets that root writes for a service belong to the service's user, and stay that user's when they are rewritten."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.commands.keys import keys
from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.file_owner import FileOwner, kept
from tidegate.tools.attest_cli import attest
from tidegate.tools.pki_cli import pki

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
SERVICE = "nobody"  # a user that every machine has, and that may do nothing


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def owner_of(path: Path) -> str:
    return pwd.getpwuid(path.stat().st_uid).pw_name


@pytest.mark.slow
@as_root
def test_a_certificate_that_root_issues_for_a_service_can_be_read_by_its_user_also_after_renewal(
    open_folder: Path,
) -> None:
    folder = ["--dir", str(open_folder / "pki")]
    assert CliRunner().invoke(pki, ["init", *folder]).exit_code == 0
    made = CliRunner().invoke(pki, ["issue", "pool/cloud", *folder, "--owner", SERVICE])
    key = open_folder / "pki" / "pool" / "cloud.key"
    assert (made.exit_code, owner_of(key), key.stat().st_mode & 0o777) == (0, SERVICE, 0o600), made.output
    before = key.read_bytes()
    assert CliRunner().invoke(pki, ["renew", "pool/cloud", "--force", *folder]).exit_code == 0
    assert key.read_bytes() != before and owner_of(key) == SERVICE


@as_root
def test_a_key_that_root_revokes_is_revoked_for_the_gateway_which_can_still_read_the_file(open_folder: Path) -> None:
    file = ["--file", str(open_folder / "keys.json")]
    made = CliRunner().invoke(keys, ["create", *file, "--tenant", "clinic", "--owner", SERVICE])
    assert made.exit_code == 0, made.output
    id = made.stdout.split("_")[1]
    assert CliRunner().invoke(keys, ["revoke", *file, id]).exit_code == 0
    assert owner_of(open_folder / "keys.json") == SERVICE


@as_root
def test_an_attestation_key_is_given_to_the_service_that_shows_it(open_folder: Path) -> None:
    key = open_folder / "attest.key"
    assert CliRunner().invoke(attest, ["init", str(key), "--owner", SERVICE]).exit_code == 0
    assert owner_of(key) == SERVICE


@as_root
def test_a_folder_that_the_service_cannot_enter_is_an_error_that_names_it(open_folder: Path) -> None:
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    made = CliRunner().invoke(attest, ["init", str(closed / "attest.key"), "--owner", SERVICE])
    assert made.exit_code == 1
    assert f"nobody cannot enter {closed}" in made.output and f"chmod a+x {closed}" in made.output


def test_an_owner_who_does_not_exist_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    made = CliRunner().invoke(attest, ["init", str(tmp_path / "attest.key"), "--owner", "nobody-of-this-name"])
    assert made.exit_code == 2 and "there is no user 'nobody-of-this-name' here" in made.output
    assert list(tmp_path.iterdir()) == []


@as_root
def test_a_file_that_a_stranger_left_in_wait_does_not_become_the_strangers_key(open_folder: Path) -> None:
    stranger = FileOwner.parse(SERVICE)
    waiting = open_folder / "key"
    write_atomically(waiting, b"", owner=stranger.ids)
    assert kept(waiting) == stranger.ids
    open_folder.chmod(0o1777)
    assert kept(waiting) is None

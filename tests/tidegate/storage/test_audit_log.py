"""The audit log of commands: each change of keys and of models, with its account, beside the changed file."""

from __future__ import annotations

import io
import json
import os
import pwd
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from gateway.commands.keys import keys
from tidegate.models.digest import sha256_of
from tidegate.storage import audit_log
from tidegate.tools.build.cli import model

ME = f"os:{pwd.getpwuid(os.getuid()).pw_name}"


def run_keys(path: Path, *words: str) -> Result:
    return CliRunner().invoke(keys, [words[0], "--file", str(path), *words[1:]])


def noted(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def on_stderr(done: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]


def test_each_change_of_a_key_is_a_line_beside_the_file_and_on_stderr_without_the_secret(tmp_path: Path) -> None:
    path, notes = tmp_path / "keys.json", tmp_path / "keys.audit.jsonl"
    created = run_keys(path, "create", "--tenant", "clinic", "--models", "minilm*", "--right", "infer")
    id = created.stdout.split("_")[1]
    rotated = run_keys(path, "rotate", id, "--overlap", "1h")
    revoked = run_keys(path, "revoke", id)

    found = noted(notes)

    assert [(one["audit"], one["who"], one["uid"], one["id"], one["tenant"]) for one in found] == [
        (f"key-{what}", ME, os.getuid(), id, "clinic") for what in ("created", "rotated", "revoked")
    ]
    assert found[0]["models"] == ["minilm*"]
    assert all(datetime.fromisoformat(one["at"]).tzinfo for one in found)
    assert found == [line for done in (created, rotated, revoked) for line in on_stderr(done)]
    assert stat.S_IMODE(notes.stat().st_mode) == 0o600
    for done in (created, rotated):
        assert done.stdout.strip().split("_")[2] not in notes.read_text() + done.stderr


def test_what_changes_nothing_leaves_no_line(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert run_keys(path, "create", "--tenant", "clinic").exit_code == 0
    for words in (("list",), ("revoke", "0" * 12), ("rotate", "0" * 12), ("create", "--tenant", "no name")):
        run_keys(path, *words)
    assert [one["audit"] for one in noted(tmp_path / "keys.audit.jsonl")] == ["key-created"]


@pytest.mark.parametrize("what", ["folder", "link"])
def test_a_change_that_cannot_be_noted_says_so_and_is_still_on_stderr(tmp_path: Path, what: str) -> None:
    notes, elsewhere = tmp_path / "keys.audit.jsonl", tmp_path / "elsewhere"
    elsewhere.write_text("as it was")
    if what == "folder":
        notes.mkdir()
    else:
        notes.symlink_to(elsewhere)

    done = run_keys(tmp_path / "keys.json", "create", "--tenant", "clinic")

    assert done.exit_code == 1
    assert "key-created is done, but could not be noted in" in done.stderr
    assert [one["audit"] for one in on_stderr(done)] == ["key-created"]
    assert done.stdout.startswith("tg_"), "the key is good, so whoever made it must get it"
    assert elsewhere.read_text() == "as it was"


@contextmanager
def room_for(path: Path, more_bytes: int) -> Iterator[None]:
    """Lets the file grow by so many bytes, as a nearly full disk does: the kernel takes that much of a write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_line_of_which_the_disk_takes_only_a_part_is_told_and_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, notes = Terminal(), tmp_path / "keys.audit.jsonl"
    monkeypatch.setattr("sys.stderr", screen)  # which is no file, so it is not limited
    audit_log.note(notes, "key-created", id="a")
    with room_for(notes, 40), pytest.raises(click.ClickException) as told:
        audit_log.note(notes, "key-revoked", id="b")
    audit_log.note(notes, "key-created", id="c")

    assert told.value.message.startswith(f"key-revoked is done, but could not be noted in {notes}: No space left")
    assert json.loads(screen.getvalue())["id"] == "b"
    first, part, last = notes.read_text().splitlines()
    assert [json.loads(line)["id"] for line in (first, last)] == ["a", "c"]
    assert len(part) == 40 and part.startswith('{"audit":"key-revoked"')


def test_an_account_without_a_name_is_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.storage.audit_log.os.getuid", lambda: 4_000_000_001)
    audit_log.note(tmp_path / "x.jsonl", "key-created")
    assert noted(tmp_path / "x.jsonl")[0]["who"] == "os:4000000001"


def test_a_model_that_is_added_or_replaced_is_a_line_in_its_repository_with_the_manifests_digest(
    tmp_path: Path,
) -> None:
    words = ["paced", "slow", "--edge-ms", "1:8", "--repository", str(tmp_path)]
    digests = []
    for more in ([], ["--force", "--pool-ms", "1:4"], []):
        done = CliRunner().invoke(model, [*words, *more])
        if done.exit_code == 0:
            digests.append(sha256_of(tmp_path / "slow" / "1" / "model.yaml"))

    found = noted(tmp_path / "audit.jsonl")

    assert [(one["audit"], one["who"], one["model"], one["version"]) for one in found] == [
        ("model-added", ME, "slow", "1")
    ] * 2
    assert [one["manifest_sha256"] for one in found] == digests
    assert digests[0] != digests[1]
    assert CliRunner().invoke(model, ["list", "--repository", str(tmp_path)]).exit_code == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_line_only_if_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    audit_log.note(tmp_path / "audit.jsonl", "key-created", id="a")
    assert screen.getvalue() == "" and len(noted(tmp_path / "audit.jsonl")) == 1

    with pytest.raises(click.ClickException):
        audit_log.note(tmp_path / "absent" / "audit.jsonl", "key-created", id="b")
    assert json.loads(screen.getvalue())["id"] == "b"

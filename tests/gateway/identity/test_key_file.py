"""The key file, the commands that change it, and the key ring that follows it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from structlog.testing import capture_logs

from gateway.commands.keys import keys
from gateway.identity.credential import UnprovedCredential
from gateway.identity.key_file import edit_keys, read_keys
from gateway.identity.keyring import Changes, KeyRing
from tests.support.gateway.guarded import Keys
from tidegate import clock
from tidegate.caller import Grant, UsageLimits
from tidegate.config import ConfigError
from tidegate.storage import audit_log


def run(path: Path, *words: str) -> Result:
    return CliRunner().invoke(keys, [words[0], "--file", str(path), *words[1:]])


def made(path: Path, *words: str) -> tuple[str, str]:
    """A new key's id and text."""
    done = run(path, "create", *words)
    assert done.exit_code == 0, done.output
    text = done.stdout.strip()
    return text.split("_")[1], text


async def standing(path: Path, text: str) -> str:
    async with KeyRing(path) as ring:
        try:
            return ring.identify(text, clock.utc_s()).id
        except UnprovedCredential as error:
            return error.reason


def test_a_list_shows_what_was_granted_whatever_brackets_are_in_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made(path, "--tenant", "acme", "--models", "minilm-[ab]*", "--note", "see [/wiki/x]", "--expires", "1h")
    (record,) = read_keys(path)
    with edit_keys(path) as records:  # as something else may have written it
        records[record.id] = replace(record, expires_at=1e15)
    listed = CliRunner(env={"COLUMNS": "200"}).invoke(keys, ["list", "--file", str(path)])
    assert listed.exit_code == 0, listed.output
    for shown in ("minilm-[ab]*", "see [/wiki/x]", "beyond the calendar"):
        assert shown in listed.output
    endless = run(path, "create", "--tenant", "a", "--expires", "9999999d")
    assert endless.exit_code == 2 and "at most" in endless.output and len(read_keys(path)) == 1


async def test_a_key_that_is_made_is_good_and_says_all_that_was_granted(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    id, text = made(
        path, "--tenant", "acme", "--models", "a*", "--models", "b", "--highest-priority", "2", "--pin", "site",
        "--right", "infer", "--right", "metrics", "--requests-per-s", "5", "--max-in-flight", "3", "--expires", "1h",
    )  # fmt: skip

    assert await standing(path, text) == f"key:{id}"
    (record,) = read_keys(path)
    limits = UsageLimits(requests_per_s=5.0, max_in_flight=3)
    assert record.grant == Grant("acme", ("a*", "b"), 2, "site", ("infer", "metrics"), limits)
    assert record.expires_at == pytest.approx(record.created_at + 3600)
    assert text.split("_")[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["keys.audit.jsonl", "keys.json", "keys.json.lock"]


async def test_a_rotated_key_is_good_in_both_forms_and_a_revoked_one_in_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    id, old = made(path, "--tenant", "acme")
    new = run(path, "rotate", id, "--overlap", "1h").stdout.strip()
    assert [await standing(path, text) for text in (old, new)] == [f"key:{id}"] * 2

    newer = run(path, "rotate", id, "--overlap", "0s").stdout.strip()
    assert [await standing(path, text) for text in (old, new, newer)] == ["wrong", "wrong", f"key:{id}"]

    assert run(path, "revoke", id).exit_code == 0
    assert [await standing(path, text) for text in (old, newer)] == ["wrong", "revoked"]
    before = read_keys(path)
    again = run(path, "revoke", id)
    assert again.exit_code == 0 and again.stderr.startswith(f"key {id} was revoked already, at 20")
    assert read_keys(path) == before
    assert (tmp_path / "keys.audit.jsonl").read_text().count("key-revoked") == 1


def test_a_list_shows_standings_and_no_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made(path, "--tenant", "acme", "--note", "the clinic")
    revoked, _ = made(path, "--tenant", "acme")
    run(path, "revoke", revoked)
    expired, _ = made(path, "--tenant", "acme", "--expires", "0s")

    listed = json.loads(run(path, "list", "--json").stdout)

    assert [one["standing"] for one in listed] == ["valid", "revoked", "expired"]
    assert "the clinic" in run(path, "list").stdout
    for record in read_keys(path):
        assert record.secrets[0].digest not in json.dumps(listed)
    assert "is expired" in run(path, "rotate", expired).stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("create", "--tenant", "no spaces"), "is no tenant's name"),
        (("create", "--tenant", "a", "--expires", "soon"), "is no duration"),
        (("create", "--tenant", "a", "--right", "root"), "root"),
        (("create", "--tenant", "a", "--requests-per-s", "nan"), "no finite number"),
        (("create", "--tenant", "a", "--tokens-per-s", "inf"), "no finite number"),
        (("revoke", "nobody"), "has no key 'nobody'"),
        (("rotate", "nobody"), "has no key 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    done = run(tmp_path / "keys.json", *words)
    assert done.exit_code != 0
    assert why in done.stderr
    assert not (tmp_path / "keys.json").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no file of keys"),
        ("[]", "is no file of keys"),
        ('{"format": 1, "keys": [], "extra": 1}', "is no file of keys"),
        ('{"format": 2, "keys": []}', "has format 2"),
        ('{"format": 1, "keys": [{"id": "1", "salt": "xyz", "secrets": [], "grant": {"tenant": "a"}, "created_at": 1}]'
         "}",
         "is no file of keys"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_keys(path)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made(path, "--tenant", "acme")
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="others than its owner may write"):
        read_keys(path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tidegate keys create"):
        read_keys(tmp_path / "keys.json")


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made(path, "--tenant", "acme")
    before = path.read_bytes()
    with pytest.raises(RuntimeError), edit_keys(path) as records:
        records.clear()
        raise RuntimeError
    assert path.read_bytes() == before


def test_keys_that_are_made_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    one = Keys(tmp_path / "keys.json", {}, {})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: one.add(f"k{n}", Grant("acme")), range(24)))
    assert len(read_keys(one.path)) == 24


async def test_a_ring_tells_what_changed_and_keeps_the_identities_of_what_did_not(tmp_path: Path) -> None:
    some, seen = Keys(tmp_path / "keys.json", {}, {}), list[Changes]()
    for name in ("stays", "goes", "ends"):
        some.add(name, Grant("acme"))
    async with KeyRing(some.path, seen.append) as ring:
        before = ring.identify(some.texts["stays"], 0.0)
        some.revoke("ends")
        some.add("new", Grant("acme"))
        with edit_keys(some.path) as records:
            del records[some.records["goes"].id]

        ring.look()
        ring.look()

        assert ring.identify(some.texts["stays"], 0.0) is before
        ids = {name: one.id for name, one in some.records.items()}
        assert seen == [
            {"created": [ids["new"]], "changed": [], "revoked": [ids["ends"]], "removed": [ids["goes"]]}
        ]  # fmt: skip
        for name, reason in (("ends", "revoked"), ("goes", "wrong")):
            with pytest.raises(UnprovedCredential) as refused:
                ring.identify(some.texts[name], 0.0)
            assert (refused.value.reason, refused.value.who) == (reason, f"key:{ids[name]}")
        assert repr(ring) == f"<KeyRing {some.path} 3 keys>"


async def test_a_file_that_breaks_leaves_the_keys_and_is_logged_once(tmp_path: Path) -> None:
    some = Keys(tmp_path / "keys.json", {}, {})
    text = some.add("one", Grant("acme"))
    whole = some.path.read_bytes()
    async with KeyRing(some.path) as ring:
        with capture_logs() as logs:
            some.path.write_bytes(b"{")
            ring.look()
            ring.look()
            os.unlink(some.path)
            ring.look()
            assert ring.identify(text, 0.0).tenant == "acme"
        assert [one["event"] for one in logs] == ["the keys stay as they were"] * 2

        some.path.write_bytes(whole)
        some.path.chmod(0o600)
        some.add("two", Grant("acme"))
        ring.look()
        assert len(ring.ids) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("salt", "00" * 65), ("salt", "zz"), ("secrets", [{"digest": "0"}])],
)
def test_a_key_that_could_not_be_tried_is_refused_when_it_is_read(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "keys.json"
    made(path, "--tenant", "acme")
    text = json.loads(path.read_text())
    text["keys"][0][key] = value
    path.write_text(json.dumps(text))
    with pytest.raises(ConfigError, match="is no file of keys"):
        read_keys(path)


def test_a_linked_file_of_keys_stays_linked_so_that_a_revocation_reaches_every_reader(tmp_path: Path) -> None:
    path, link = tmp_path / "keys.json", tmp_path / "here" / "keys.json"
    made(path, "--tenant", "acme")
    link.parent.mkdir()
    link.symlink_to(path)
    (record,) = read_keys(path)

    assert CliRunner().invoke(keys, ["revoke", record.id, "--file", str(link)]).exit_code == 0

    assert link.is_symlink() and read_keys(path)[0].revoked_at is not None


@pytest.mark.parametrize("command", ["create", "rotate"])
def test_a_key_that_cannot_be_printed_is_noted_and_named(tmp_path: Path, command: str) -> None:
    path = tmp_path / "keys.json"
    id = made(path, "--tenant", "acme")[0] if command == "rotate" else ""
    words = [id] if id else ["--tenant", "acme"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tidegate", "keys", command, *words, "--file", str(path)],
            stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60.0,
        )  # fmt: skip
    finally:
        os.close(writer)

    (record,) = read_keys(path)
    notes = [json.loads(line) for line in audit_log.beside(path).read_text().splitlines()]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (notes[-1]["audit"], notes[-1]["id"]) == (f"key-{command}d", record.id)
    way_out = f"tidegate keys {'revoke' if command == 'create' else 'rotate'} {record.id} --file {path}"
    assert f"key {record.id}" in done.stderr and "could not be printed (Broken pipe)" in done.stderr
    assert way_out in done.stderr


def test_a_key_whose_line_cannot_be_written_is_printed_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    audit_log.beside(path).mkdir()
    done = run(path, "create", "--tenant", "acme")
    (record,) = read_keys(path)
    assert done.exit_code == 1 and "could not be noted" in done.output
    assert f"_{record.id}_" in done.stdout


def test_reading_a_small_file_of_keys_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made(path, "--tenant", "acme")
    tracemalloc.start()
    try:
        read_keys(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()

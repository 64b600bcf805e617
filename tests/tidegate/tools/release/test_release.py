"""A release is taken as it was signed, and refused by name for whatever was done to it on its way."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.signing_keys import signing
from tidegate.config import ConfigError
from tidegate.security.attestation.keys import line_of, make_key, read_allowed, read_key
from tidegate.tools.release import cli
from tidegate.tools.release.checksums import ReleaseRefused, decode_sums, encode_sums
from tidegate.tools.release.envelope import PAYLOAD_TYPE, read_envelope
from tidegate.tools.release.sealed_release import ReleaseOrigin, seal
from tidegate.tools.release.statement import check_builder, make_statement, read_statement

WHEEL = "tidegate-9.9.9-py3-none-any.whl"
COMMIT = "c0" * 20
BUILDER = "https://ci.example/tidegate/release"
ORIGIN = ReleaseOrigin("9.9.9", BUILDER, COMMIT, {"constraints.txt": "ab" * 32})


def tidegate(group: str, *words: str | Path) -> Result:
    return CliRunner().invoke({"release": cli.release, "signing": signing}[group], [str(word) for word in words])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys `operator` and `stranger`, as `tidegate keys signing create` makes them."""
    folder = tmp_path / "keys"
    for name in ("operator", "stranger"):
        key = make_key(folder / f"{name}.key")
        (folder / f"{name}.pub").write_text(f"{line_of(key, name)}\n")
    return folder


@pytest.fixture
def release(tmp_path: Path, keys: Path) -> Path:
    """A release of three files, signed by the operator."""
    folder = tmp_path / "9.9.9"
    folder.mkdir()
    for name, content in ((WHEEL, b"wheel"), ("tidegate-9.9.9.tar.gz", b"source"), ("constraints.txt", b"click==1\n")):
        (folder / name).write_bytes(content)
    seal(folder, ORIGIN)
    assert tidegate("release", "sign", folder, "--key", keys / "operator.key").exit_code == 0
    return folder


def test_a_signed_release_says_what_it_is(release: Path, keys: Path) -> None:
    done = tidegate("release", "verify", release, "--key", keys / "operator.pub", "--version", "9.9.9")

    assert done.exit_code == 0, done.output
    (kid,) = read_allowed(keys / "operator.pub")
    assert f"3 files are as signed by {kid}" in done.output
    assert f"version 9.9.9, of commit {COMMIT}, built by {BUILDER}" in done.output


def added(release: Path) -> None:
    (release / "tidegate-9.9.10-py3-none-any.whl").write_bytes(b"later, and not ours")


def list_rewritten(release: Path) -> None:
    """As an attacker would who changes a file: the list fits it again."""
    (release / WHEEL).write_bytes(b"evil")
    sums = decode_sums((release / "SHA256SUMS").read_bytes())
    (release / "SHA256SUMS").unlink()
    seal(release, None)
    assert decode_sums((release / "SHA256SUMS").read_bytes()).keys() == sums.keys()


def resealed(release: Path) -> None:
    """The list and the statement fit the changed file, and only the signature is not theirs to make."""
    (release / WHEEL).write_bytes(b"evil")
    seal(release, ORIGIN)


def envelope_rewritten(release: Path) -> None:
    resealed(release)
    envelope = json.loads((release / "provenance.intoto.jsonl").read_text())
    payload = (release / "provenance.json").read_bytes().removesuffix(b"\n")
    envelope["payload"] = base64.b64encode(payload).decode()
    (release / "provenance.intoto.jsonl").write_text(json.dumps(envelope))


def escaping(release: Path) -> None:
    """An id that would clear the terminal of the reader."""
    envelope = json.loads((release / "provenance.intoto.jsonl").read_text())
    envelope["signatures"][0]["keyid"] = "\x1b[2J"
    (release / "provenance.intoto.jsonl").write_text(json.dumps(envelope))


def linked(release: Path) -> None:
    (release / WHEEL).rename(release.parent / "elsewhere")
    (release / WHEEL).symlink_to(release.parent / "elsewhere")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / WHEEL).write_bytes(b"whee1"), f"{WHEEL}: changed: its SHA-256 is "),
        (lambda folder: (folder / WHEEL).unlink(), f"{WHEEL}: missing"),
        (added, "tidegate-9.9.10-py3-none-any.whl: not in the release"),
        (list_rewritten, "SHA256SUMS: changed"),
        (resealed, "provenance.json: changed: it is not the statement that was signed"),
        (envelope_rewritten, "is wrong: the statement was changed after it was signed"),
        (escaping, "no signed statement"),
        (lambda folder: (folder / "\x1b[2Jall is well").mkdir(), r"'\x1b[2Jall is well': no name"),
        (linked, f"{WHEEL}: not a plain file"),
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe: not a plain file"),
        (lambda folder: (folder / "more").mkdir(), "more: not a plain file"),
        (lambda folder: (folder / "-rf").write_bytes(b""), "'-rf': no name for a file of a release"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), "SHA256SUMS: missing"),
        (lambda folder: (folder / "provenance.json").unlink(), "provenance.json: missing"),
        (lambda folder: (folder / "provenance.intoto.jsonl").unlink(), "the release is not signed"),
        (lambda folder: (folder / "provenance.intoto.jsonl").write_bytes(b"["), "no signed statement"),
        (lambda folder: (folder / "provenance.intoto.jsonl").write_bytes(b"[" * 2**21), "more than 1048576 bytes"),
    ],
)
def test_what_was_done_to_a_release_is_named(
    release: Path, keys: Path, harm: Callable[[Path], object], words: str
) -> None:
    harm(release)

    done = tidegate("release", "verify", release, "--key", keys / "operator.pub")

    assert done.exit_code == 1
    assert "is not a release to install" in done.output
    assert words in done.output
    assert "\x1b" not in done.output


def test_a_pipe_in_the_place_of_the_list_makes_no_reader_wait(release: Path) -> None:
    (release / "SHA256SUMS").unlink()
    os.mkfifo(release / "SHA256SUMS")

    done = tidegate("release", "verify", release, "--checksums-only")

    assert done.exit_code == 1
    assert "SHA256SUMS: not a plain file" in done.output


def test_a_release_is_told_as_json(release: Path, keys: Path) -> None:
    signed = json.loads(tidegate("release", "verify", release, "--key", keys / "operator.pub", "--json").stdout)
    listed = json.loads(tidegate("release", "verify", release, "--checksums-only", "--json").stdout)
    assert (signed["version"], len(signed["signers"]), signed["files"]) == ("9.9.9", 1, listed["files"])
    assert "version" not in listed


def test_every_wrong_file_is_named_at_once(release: Path, keys: Path) -> None:
    (release / WHEEL).write_bytes(b"evil")
    (release / "constraints.txt").unlink()
    added(release)

    lines = tidegate("release", "verify", release, "--key", keys / "operator.pub").output.splitlines()

    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "constraints.txt", "tidegate-9.9.10-py3-none-any.whl", WHEEL
    ]  # fmt: skip


def test_another_key_than_the_operators_is_refused_by_its_id(release: Path, keys: Path) -> None:
    (kid,) = read_allowed(keys / "operator.pub")

    done = tidegate("release", "verify", release, "--key", keys / "stranger.pub")

    assert done.exit_code == 1
    assert f"it is signed by {kid}, and none of these is among the keys that --key names" in done.output


def test_a_strangers_signature_under_the_operators_id_is_wrong(release: Path, keys: Path) -> None:
    (release / "provenance.intoto.jsonl").unlink()
    assert tidegate("release", "sign", release, "--key", keys / "stranger.key").exit_code == 0
    envelope = json.loads((release / "provenance.intoto.jsonl").read_text())
    (kid,) = read_allowed(keys / "operator.pub")
    envelope["signatures"][0]["keyid"] = kid
    (release / "provenance.intoto.jsonl").write_text(json.dumps(envelope))

    done = tidegate("release", "verify", release, "--key", keys / "operator.pub")

    assert f"the signature of the key {kid} is wrong" in done.output


def test_several_sign_one_after_another_and_each_is_enough(release: Path, keys: Path) -> None:
    for _ in range(2):  # again by the same key replaces its signature
        assert tidegate("release", "sign", release, "--key", keys / "stranger.key").exit_code == 0

    for name in ("operator", "stranger"):
        assert tidegate("release", "verify", release, "--key", keys / f"{name}.pub").exit_code == 0
    assert len(read_envelope((release / "provenance.intoto.jsonl").read_bytes()).signatures) == 2


def test_an_older_release_of_the_same_key_is_not_the_one_that_is_meant(release: Path, keys: Path) -> None:
    done = tidegate("release", "verify", release, "--key", keys / "operator.pub", "--version", "10.0.0")

    assert done.exit_code == 1
    assert "it is 9.9.9, and signed as that, not 10.0.0" in done.output


def test_what_is_not_as_it_says_is_not_signed(release: Path, keys: Path) -> None:
    (release / WHEEL).write_bytes(b"evil")

    done = tidegate("release", "sign", release, "--key", keys / "stranger.key")

    assert done.exit_code == 1
    assert f"{WHEEL}: changed" in done.output
    assert len(read_envelope((release / "provenance.intoto.jsonl").read_bytes()).signatures) == 1


def test_a_signature_over_another_build_is_not_kept_beside_a_new_one(release: Path, keys: Path) -> None:
    resealed(release)

    done = tidegate("release", "sign", release, "--key", keys / "stranger.key")

    assert "it signs another statement than provenance.json: remove it" in done.output


def test_without_a_key_one_has_to_say_that_nobody_is_asked(release: Path, keys: Path) -> None:
    assert tidegate("release", "verify", release).exit_code == 2
    both = tidegate("release", "verify", release, "--checksums-only", "--key", keys / "operator.pub")
    assert both.exit_code == 2

    done = tidegate("release", "verify", release, "--checksums-only")

    assert done.exit_code == 0
    assert "who made them was not checked" in done.output


def test_sha256sum_takes_the_list(release: Path) -> None:
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=release, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": OK") == 3


def test_the_signature_is_one_that_others_tools_check(release: Path, keys: Path) -> None:
    """Written again here from the specification, without the code that signed."""
    envelope = json.loads((release / "provenance.intoto.jsonl").read_text())
    payload = base64.b64decode(envelope["payload"])
    (public,) = read_allowed(keys / "operator.pub").values()
    kind = "application/vnd.in-toto+json"

    message = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    Ed25519PublicKey.from_public_bytes(public).verify(base64.b64decode(envelope["signatures"][0]["sig"]), message)

    assert envelope["payloadType"] == kind == PAYLOAD_TYPE
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {one["name"] for one in statement["subject"]} == {
        WHEEL, "tidegate-9.9.9.tar.gz", "constraints.txt", "SHA256SUMS"
    }  # fmt: skip
    build = statement["predicate"]["buildDefinition"]
    assert build["resolvedDependencies"] == [
        {"name": "commit", "digest": {"gitCommit": COMMIT}},
        {"name": "constraints.txt", "digest": {"sha256": "ab" * 32}},
    ]
    assert statement["predicate"]["runDetails"]["builder"]["id"] == BUILDER


def test_a_key_that_others_may_read_signs_nothing(release: Path, keys: Path) -> None:
    (keys / "operator.key").chmod(0o644)

    done = tidegate("release", "sign", release, "--key", keys / "operator.key")

    assert isinstance(done.exception, ConfigError)
    assert "chmod 600" in str(done.exception)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"{'a' * 64}  ../../etc/passwd", "not a line"),
        (f"{'a' * 64}  /etc/passwd", "not a line"),
        (f"{'a' * 64}  .hidden", "not a line"),
        (f"{'a' * 64}  SHA256SUMS", "not a line"),
        (f"{'A' * 64}  wheel", "not a line"),
        (f"{'a' * 63}  wheel", "not a line"),
        ("", "lists no file"),
        (f"{'a' * 64}  wheel\n{'b' * 64}  wheel", "wheel stands there twice"),
        ("\udcff", "not a line"),
    ],
)
def test_a_list_that_is_none_is_refused(line: str, why: str) -> None:
    with pytest.raises(ReleaseRefused, match=why):
        decode_sums(line.encode(errors="surrogateescape"))


@pytest.mark.slow
@given(st.dictionaries(st.from_regex(r"[a-z0-9_][a-z0-9._+~-]{0,20}", fullmatch=True),
                       st.from_regex(r"[0-9a-f]{64}", fullmatch=True), min_size=1, max_size=8))  # fmt: skip
def test_a_list_reads_back_as_it_was_written(digests: dict[str, str]) -> None:
    assert decode_sums(encode_sums(digests)) == digests


@given(st.binary(max_size=200))
def test_hostile_bytes_are_refused_and_nothing_else(raw: bytes) -> None:
    for reader in (read_statement, read_envelope):
        with pytest.raises(ReleaseRefused):
            reader(raw)


@pytest.mark.parametrize("builder", ["me", "", "https://", "https://me:secret@ci.example/", "https://a b"])
def test_a_builder_is_a_uri_without_secrets(builder: str) -> None:
    with pytest.raises(ValueError, match="builder"):
        check_builder(builder)


def test_a_statement_has_no_time_and_no_number_of_a_run() -> None:
    given = ("9.9.9", BUILDER, COMMIT, {"constraints.txt": "ab" * 32}, {"SHA256SUMS": "cd" * 32})
    assert make_statement(*given) == make_statement(*given)
    with pytest.raises(ValueError, match="is no commit"):
        make_statement("9.9.9", BUILDER, "HEAD", {}, {})


def test_a_key_of_the_release_is_one_that_signs_rollouts(tmp_path: Path, release: Path) -> None:
    (release / "provenance.intoto.jsonl").unlink()
    assert tidegate("signing", "create", "operator-2", "--dir", tmp_path).exit_code == 0
    read_key(tmp_path / "operator-2.key")

    assert tidegate("release", "sign", release, "--key", tmp_path / "operator-2.key").exit_code == 0
    assert tidegate("release", "verify", release, "--key", tmp_path / "operator-2.pub").exit_code == 0

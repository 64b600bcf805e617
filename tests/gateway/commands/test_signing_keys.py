"""`tidegate keys signing`: a private key for the operator, and the public line that makes devices trust it."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.commands.keys import keys
from tidegate.config import ConfigError
from tidegate.rollout.desired import DesiredDocument
from tidegate.rollout.root_chain import TrustedRoot, read_chain, walk
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


# -- a root that several machines sign -----------------------------------------------------------------------------


class Machines:
    """Folders that stand for machines: each has its own key, and gets nothing of the others but public lines."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        for name in names:
            (folder / name).mkdir()
            self.run("create", name, "--dir", folder / name)

    def run(self, *words: object) -> Result:
        result = CliRunner().invoke(keys, ["signing", *map(str, words)])
        if isinstance(result.exception, ConfigError):
            raise result.exception
        return result

    def key(self, name: str) -> Path:
        return self.folder / name / f"{name}.key"

    def pub(self, name: str) -> Path:
        return self.folder / name / f"{name}.pub"

    def kid(self, name: str) -> str:
        return next(iter(read_allowed(self.pub(name))))

    def signed_at(self, draft: Path, name: str) -> Path:
        """The copy of a draft that comes back from a machine."""
        copy = self.folder / name / draft.name
        copy.write_bytes(draft.read_bytes())
        assert self.run("sign", copy, "--key", self.key(name)).exit_code == 0
        return copy


def test_a_root_is_signed_on_several_machines_one_by_one(tmp_path: Path) -> None:
    at = Machines(tmp_path, "old", "a", "b", "c")
    chain, draft = tmp_path / "roots.json", tmp_path / "root.json"
    to = [word for name in "abc" for word in ("--to", at.pub(name))]
    assert at.run("draft", chain, draft, *to, "--threshold", 2).exit_code == 0 and not chain.exists()

    copies = [at.signed_at(draft, name) for name in ("old", "a")]
    early = at.run("merge", chain, *copies, "--trusted", at.pub("old"))
    assert early.exit_code == 1 and not chain.exists()
    assert "1 more of its own keys" in early.output and at.kid("b") in early.output and at.kid("a") not in early.output
    copies.append(at.signed_at(draft, "b"))
    assert at.run("merge", chain, *copies, "--trusted", at.pub("old")).exit_code == 0

    trusted = TrustedRoot(read_allowed(at.pub("old")))
    at_2 = walk(trusted, read_chain(chain))
    assert (at_2.version, at_2.threshold, set(at_2.keys)) == (2, 2, {at.kid("a"), at.kid("b"), at.kid("c")})

    # The next: two of the three, of which one leaves.
    assert at.run("draft", chain, draft, "--to", at.pub("b"), "--to", at.pub("c"), "--threshold", 2).exit_code == 0
    one_by_one = at.signed_at(at.signed_at(draft, "b"), "c")  # handed on instead of merged
    assert at.run("merge", chain, one_by_one).exit_code == 0
    assert walk(trusted, read_chain(chain)).version == 3
    assert "signing-root-rotated" in (tmp_path / "roots.audit.jsonl").read_text()


@pytest.mark.slow
def test_signatures_of_strangers_and_broken_ones_do_not_count_and_take_no_room(tmp_path: Path) -> None:
    strangers = [f"s{number}" for number in range(16)]
    at = Machines(tmp_path, "old", "a", *strangers)
    chain, draft = tmp_path / "roots.json", tmp_path / "root.json"
    at.run("draft", chain, draft, "--to", at.pub("a"))
    crowded = draft
    for name in strangers:
        crowded = at.signed_at(crowded, name)
    broken = at.signed_at(draft, "old")
    link = msgspec.json.decode(broken.read_bytes())
    link["sigs"][0]["sig"] = base64.b64encode(bytes(64)).decode()
    broken.write_bytes(msgspec.json.encode(link))
    refused = at.run("merge", chain, crowded, broken, "--trusted", at.pub("old"))
    assert refused.exit_code == 1 and at.kid("old") in refused.output and at.kid("a") in refused.output

    both = at.signed_at(at.signed_at(draft, "old"), "a")
    assert at.run("merge", chain, crowded, broken, both, "--trusted", at.pub("old")).exit_code == 0
    assert len(read_chain(chain)[0].signatures) == 2


def test_copies_of_different_drafts_and_what_is_no_draft_are_refused(tmp_path: Path) -> None:
    at = Machines(tmp_path, "old", "a")
    chain, one, other = tmp_path / "roots.json", tmp_path / "one.json", tmp_path / "other.json"
    at.run("draft", chain, one, "--to", at.pub("a"))
    at.run("draft", chain, other, "--to", at.pub("old"))
    differ = at.run("merge", chain, one, other, "--trusted", at.pub("old"))
    assert differ.exit_code == 1 and "different roots" in differ.output
    assert at.run("merge", chain, one).exit_code == 2, "whom do devices trust?"
    assert at.run("draft", chain, other, "--to", at.pub("a"), "--threshold", 2).exit_code == 1
    for content in (b"", b"[]", b"{" * 100_000, one.read_bytes().replace(b'"version":2', b'"version": 2')):
        other.write_bytes(content)
        with pytest.raises(ConfigError, match="no draft"):
            at.run("sign", other, "--key", at.key("a"))
    done = at.signed_at(at.signed_at(one, "old"), "a")
    assert at.run("merge", chain, done, "--trusted", at.pub("old")).exit_code == 0
    again = at.run("merge", chain, done)
    assert again.exit_code == 1 and "already" in again.output

"""The trusted documents of a device: what is lost or damaged on its disk never makes it trust more than before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_agent.delivery.documents import TrustedDocuments
from gateway.core.versions.canary import CanaryRollout, DeviceStep, DocumentRevisions, RolloutPhase, RolloutSpec
from tests.support.bad_block import on_a_bad_block
from tests.support.edge.rollouts import Author
from tidegate.fleet.reported import Reported
from tidegate.rollout.canonical import canonical, digest_of
from tidegate.rollout.desired import decode_desired
from tidegate.rollout.root_chain import RootKeys, RootLink, link_of
from tidegate.rollout.signing import public_text, read_unverified, sign_document
from tidegate.security.attestation.software import key_id

AUTHOR, HEIR = Author(1), Author(9)
SCOPE = "device/kiosk-1"
ISSUED_S = 1_763_775_000  # of the author's documents
DAY_S = 86_400


def opened(folder: Path, *, now: float = ISSUED_S, pinned: Author = AUTHOR) -> TrustedDocuments:
    public = pinned.key.public_key().public_bytes_raw()
    found = TrustedDocuments(folder / "rollout", scopes=(SCOPE,), pinned={key_id(public): public}, utc_s=lambda: now)
    found.open()
    return found


def handover(revision: int = 1, **changes: Any) -> bytes:
    new = public_text(HEIR.key.public_key().public_bytes_raw())
    return AUTHOR.message(revision, keys=(new,), signers=(AUTHOR.key, HEIR.key), **changes)


def copies(folder: Path) -> tuple[Path, Path]:
    return folder / "rollout" / "trust.json", folder / "rollout-trust.json"


def report(documents: TrustedDocuments) -> Reported:
    accepted, refused = dict(documents.accepted), tuple(documents.refused.values())
    return Reported("kiosk-1", 1, 1, 0, accepted=accepted, refused=refused)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def bent(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"proven_s":1', b'"proven_s":2'))


DAMAGES = [cut, emptied, bent, Path.unlink, on_a_bad_block]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", [0, 1])
def test_one_damaged_copy_of_the_trust_record_is_mended_from_the_other(tmp_path: Path, damage: Any, which: int) -> None:
    assert opened(tmp_path).take(SCOPE, handover())
    damage(copies(tmp_path)[which])

    documents = opened(tmp_path)

    assert not documents.take(SCOPE, AUTHOR.message(2)), "the key that was rotated away stays away"
    assert documents.refused[SCOPE].reason.startswith("signature: ")
    assert documents.take(SCOPE, HEIR.message(2))
    assert copies(tmp_path)[0].read_bytes() == copies(tmp_path)[1].read_bytes()


@pytest.mark.parametrize("second", DAMAGES)
@pytest.mark.parametrize("first", DAMAGES)
def test_without_a_copy_that_can_be_read_no_document_is_accepted(tmp_path: Path, first: Any, second: Any) -> None:
    assert opened(tmp_path).take(SCOPE, handover())
    for damage, path in zip((first, second), copies(tmp_path), strict=True):
        damage(path)

    for _ in range(2):  # and a second start does not forget that
        documents = opened(tmp_path)
        for author in (AUTHOR, HEIR):
            assert not documents.take(SCOPE, author.message(2))
            assert documents.refused[SCOPE].reason.startswith("trust: ")
        assert documents.accepted == {SCOPE: 1}, "what is in force stays"


def test_the_way_out_of_lost_trust_is_to_remove_what_is_left(tmp_path: Path) -> None:
    opened(tmp_path).take(SCOPE, handover())
    for path in copies(tmp_path):
        cut(path)
    for path in copies(tmp_path):
        path.unlink()
    shutil.rmtree(tmp_path / "rollout" / "desired")
    assert opened(tmp_path).take(SCOPE, AUTHOR.message(1))


@pytest.mark.parametrize("damage", [cut, emptied, Path.unlink, on_a_bad_block])
def test_a_lost_document_lowers_no_revision_and_the_same_one_is_taken_back(tmp_path: Path, damage: Any) -> None:
    assert opened(tmp_path).take(SCOPE, AUTHOR.message(5))
    damage(tmp_path / "rollout" / "desired" / "device+kiosk-1.json")

    documents = opened(tmp_path)

    assert not documents.take(SCOPE, AUTHOR.message(4))
    assert documents.refused[SCOPE].reason == "revision: 4 is older than 5, which is in force"
    assert not documents.take(SCOPE, AUTHOR.message(5, urls=("https://other:1",)))
    assert "other content" in documents.refused[SCOPE].reason
    assert documents.take(SCOPE, AUTHOR.message(5))
    assert not documents.take(SCOPE, AUTHOR.message(5)), "in force already"
    assert documents.refused == {}


def test_an_older_document_restored_on_the_disk_is_not_in_force(tmp_path: Path) -> None:
    path = tmp_path / "rollout" / "desired" / "device+kiosk-1.json"
    documents = opened(tmp_path)
    documents.take(SCOPE, AUTHOR.message(1))
    old = path.read_bytes()
    documents.take(SCOPE, AUTHOR.message(2))
    path.write_bytes(old)

    documents = opened(tmp_path)

    assert documents.accepted == {}
    assert not documents.take(SCOPE, AUTHOR.message(1))
    assert documents.take(SCOPE, AUTHOR.message(2))


def test_one_restored_copy_of_the_record_brings_neither_a_key_nor_a_revision_back(tmp_path: Path) -> None:
    documents = opened(tmp_path)
    documents.take(SCOPE, AUTHOR.message(1))
    old = copies(tmp_path)[0].read_bytes()
    documents.take(SCOPE, handover(2))
    copies(tmp_path)[0].write_bytes(old)

    documents = opened(tmp_path)

    assert not documents.take(SCOPE, AUTHOR.message(3))
    assert documents.take(SCOPE, HEIR.message(3))


def test_another_file_of_operators_keys_counts_again_and_keeps_the_revisions(tmp_path: Path) -> None:
    opened(tmp_path).take(SCOPE, AUTHOR.message(5))
    documents = opened(tmp_path, pinned=HEIR)
    assert not documents.take(SCOPE, HEIR.message(4))
    assert documents.take(SCOPE, HEIR.message(6))


@pytest.mark.parametrize(("now", "accepted"), [
    (ISSUED_S, True), (ISSUED_S + DAY_S, True), (ISSUED_S + DAY_S + 300, True), (ISSUED_S + DAY_S + 301, False),
    (0.0, True),  # no battery, so 1970: nothing says that it has expired
])  # fmt: skip
def test_an_expired_document_is_not_accepted(tmp_path: Path, now: float, accepted: bool) -> None:
    documents = opened(tmp_path, now=now)
    assert documents.take(SCOPE, AUTHOR.message(1, expires_s=ISSUED_S + DAY_S)) is accepted
    assert accepted or documents.refused[SCOPE].reason.startswith("expired: ")


def test_a_clock_that_was_set_back_is_corrected_by_the_latest_time_that_was_signed(tmp_path: Path) -> None:
    """A group's newer document proves the time; the device's own, older than that by days, has expired."""
    documents = opened(tmp_path, now=0.0)
    documents.take(SCOPE, AUTHOR.message(1))
    for path in copies(tmp_path):
        assert f'"proven_s":{ISSUED_S}'.encode() in path.read_bytes()

    documents = opened(tmp_path, now=0.0)

    stale = AUTHOR.message(2, issued_s=ISSUED_S - 9 * DAY_S, expires_s=ISSUED_S - DAY_S)
    assert not documents.take(SCOPE, stale)
    assert f"the clock here says 0, a signed document {ISSUED_S}" in documents.refused[SCOPE].reason


def test_a_document_in_force_stays_when_it_expires(tmp_path: Path) -> None:
    message = AUTHOR.message(1, expires_s=ISSUED_S + DAY_S)
    opened(tmp_path).take(SCOPE, message)
    documents = opened(tmp_path, now=ISSUED_S + 99 * DAY_S)
    assert documents.accepted == {SCOPE: 1}
    assert not documents.take(SCOPE, message)
    assert documents.refused == {}


def test_a_document_that_ends_before_it_begins_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`expires`"):
        AUTHOR.message(1, expires_s=ISSUED_S)
    assert decode_desired(b'{"device":"a","issued":1,"rev":1,"v":1}').expires_s == 0


NEXT, LAST = Author(21), Author(22)


def chained(version: int, author: Author, before: Author) -> RootLink:
    text = public_text(author.key.public_key().public_bytes_raw())
    return link_of(RootKeys(version, 1, (text,)), [before.key, author.key])


def with_roots(author: Author, revision: int, *roots: RootLink, **changes: Any) -> bytes:
    desired = read_unverified(author.message(revision, **changes))
    return sign_document(desired, [author.key], roots)


CHAIN = (chained(2, HEIR, AUTHOR), chained(3, NEXT, HEIR), chained(4, LAST, NEXT))


def test_a_device_that_missed_several_roots_comes_along_and_old_keys_are_gone(tmp_path: Path) -> None:
    assert opened(tmp_path).take(SCOPE, with_roots(LAST, 1, *CHAIN))
    documents = opened(tmp_path)
    for old in (AUTHOR, HEIR, NEXT):
        assert not documents.take(SCOPE, with_roots(old, 2, *CHAIN))
        assert documents.refused[SCOPE].reason.startswith("signature: ")
    forged = chained(2, AUTHOR, AUTHOR)
    assert not documents.take(SCOPE, with_roots(AUTHOR, 2, forged)), "an older link changes nothing"
    assert documents.take(SCOPE, with_roots(LAST, 2)), "the chain need not come again"


def test_a_root_is_kept_though_its_document_is_refused(tmp_path: Path) -> None:
    documents = opened(tmp_path)
    assert not documents.take(SCOPE, with_roots(AUTHOR, 1, *CHAIN[:1]))
    assert not opened(tmp_path).take(SCOPE, AUTHOR.message(1))
    assert opened(tmp_path).take(SCOPE, HEIR.message(1))


@pytest.mark.parametrize("roots", [CHAIN[1:], (CHAIN[0], CHAIN[2]), (chained(2, LAST, HEIR),)])
def test_a_chain_with_a_skipped_or_forged_link_is_refused_with_its_document(tmp_path: Path, roots: Any) -> None:
    documents = opened(tmp_path)
    assert not documents.take(SCOPE, with_roots(LAST, 1, *roots))
    assert documents.refused[SCOPE].reason.startswith("root: version ")
    assert documents.take(SCOPE, AUTHOR.message(1)), "nothing of the chain counts"


def test_from_the_second_root_on_a_document_hands_no_keys_over(tmp_path: Path) -> None:
    documents = opened(tmp_path)
    assert documents.take(SCOPE, with_roots(HEIR, 1, *CHAIN[:1]))
    new = public_text(NEXT.key.public_key().public_bytes_raw())
    assert not documents.take(SCOPE, HEIR.message(2, keys=(new,), signers=(HEIR.key, NEXT.key)))
    assert "hands nothing over" in documents.refused[SCOPE].reason


def test_a_threshold_of_the_roots_keys_must_sign(tmp_path: Path) -> None:
    texts = tuple(public_text(one.key.public_key().public_bytes_raw()) for one in (HEIR, NEXT))
    link = link_of(RootKeys(2, 2, texts), [AUTHOR.key, HEIR.key, NEXT.key])
    documents = opened(tmp_path)
    assert not documents.take(SCOPE, with_roots(HEIR, 1, link))
    assert "the root asks for 2" in documents.refused[SCOPE].reason
    assert opened(tmp_path).take(SCOPE, HEIR.message(1, signers=(HEIR.key, NEXT.key)))


def test_new_pinned_keys_begin_a_chain_of_their_own(tmp_path: Path) -> None:
    assert opened(tmp_path).take(SCOPE, with_roots(LAST, 1, *CHAIN))
    documents = opened(tmp_path, pinned=NEXT)
    assert documents.take(SCOPE, with_roots(HEIR, 2, chained(2, HEIR, NEXT)))


def test_a_record_from_before_there_were_roots_still_has_its_digest(tmp_path: Path) -> None:
    assert opened(tmp_path).take(SCOPE, AUTHOR.message(3))
    for path in copies(tmp_path):
        held = json.loads(path.read_bytes())
        fields = {name: one for name, one in held.items() if name not in ("root", "threshold", "digest")}
        digest = digest_of(canonical({**fields, "digest": ""}))
        path.write_bytes(canonical({**fields, "digest": digest}))
    documents = opened(tmp_path)
    assert not documents.take(SCOPE, AUTHOR.message(2))
    assert documents.refused[SCOPE].reason.startswith("revision: ")


REFUSALS: dict[str, Callable[[int], bytes]] = {
    "root: version 3 does not follow 1": lambda revision: with_roots(LAST, revision, *CHAIN[1:]),
    "root: version 2 is signed by 0": lambda revision: with_roots(LAST, revision, chained(2, LAST, HEIR)),
    "signature: ": HEIR.message,
    "malformed: ": lambda revision: AUTHOR.message(revision).removesuffix(b'"v":1}') + b'"v":2}',
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_rollout_and_its_way_back_do_not_wait_for_a_device_that_refuses(tmp_path: Path, why: str) -> None:
    documents = opened(tmp_path)
    spec = RolloutSpec("r-1", "double", "2", ("kiosk-1",), {"kiosk-1": DocumentRevisions(7, 8)})
    waves = CanaryRollout(spec)
    waves.advance(0.0)
    documents.take(SCOPE, REFUSALS[why](7))
    waves.hear({"kiosk-1": report(documents)})
    part = waves.state.parts["kiosk-1"]
    assert part.step is DeviceStep.FAILED and part.reason.startswith(f"refused_{why}")
    waves.advance(0.0)
    assert waves.state.phase is RolloutPhase.RETURNING
    documents.take(SCOPE, REFUSALS[why](8))
    waves.hear({"kiosk-1": report(documents)})
    waves.advance(0.0)
    assert (part.step, waves.state.phase) == (DeviceStep.STUCK, RolloutPhase.RETURNED)


def test_a_device_that_has_lost_its_trust_says_to_which_revision_it_said_no(tmp_path: Path) -> None:
    assert opened(tmp_path).take(SCOPE, AUTHOR.message(1))
    for path in copies(tmp_path):
        cut(path)
    documents = opened(tmp_path)
    assert not documents.take(SCOPE, AUTHOR.message(2))
    assert (documents.refused[SCOPE].revision, documents.refused[SCOPE].reason[:7]) == (2, "trust: ")


def test_what_is_no_document_claims_no_revision(tmp_path: Path) -> None:
    documents = opened(tmp_path)
    for message in (b"{", b"[" * 5000, b'{"doc":{"rev":-1}}', b'{"doc":{"rev":"7"}}', b"\xff"):
        assert not documents.take(SCOPE, message)
        assert documents.refused[SCOPE].revision == 0

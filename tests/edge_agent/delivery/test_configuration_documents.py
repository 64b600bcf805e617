"""Settings in signed documents, as an attacker at the broker would send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from edge_agent.delivery.documents import TrustedDocuments
from tests.support.edge.rollouts import Author
from tidegate.rollout.desired import DesiredConfiguration, DesiredDocument
from tidegate.rollout.device_settings import SettingRefused, checked
from tidegate.rollout.signing import MAX_SIGNED_BYTES, SignedDocument, sign_document
from tidegate.security.attestation.software import key_id

AUTHOR, STRANGER = Author(1), Author(2)
OWN, GROUP = "device/kiosk-1", "group/kiosks"


def opened(folder: Path) -> TrustedDocuments:
    def why_not(configuration: DesiredConfiguration) -> str:
        try:
            checked(configuration.settings)
        except SettingRefused as error:
            return str(error)
        return ""

    public = AUTHOR.key.public_key().public_bytes_raw()
    found = TrustedDocuments(
        folder / "rollout",
        scopes=(OWN, GROUP),
        pinned={key_id(public): public},
        utc_s=lambda: 1_763_775_000,
        why_not=why_not,
    )
    found.open()
    return found


def asking(revision: int, author: Author = AUTHOR, *, scope: dict[str, str] | None = None, **settings: Any) -> bytes:
    return asking_all(revision, {key.replace("__", "."): value for key, value in settings.items()}, author, scope)


def asking_all(
    revision: int, named: dict[str, Any], author: Author = AUTHOR, scope: dict[str, Any] | None = None
) -> bytes:
    target: dict[str, Any] = scope or {"device": "kiosk-1"}
    return sign_document(
        DesiredDocument(revision, 1_763_775_000, configuration=DesiredConfiguration(named), **target), [author.key]
    )


def in_force(documents: TrustedDocuments) -> Any:
    found = documents.configuration()
    return None if found is None else (dict(found.settings), found.scope, found.revision)


def test_an_older_document_a_strangers_and_another_groups_change_nothing(tmp_path: Path) -> None:
    documents = opened(tmp_path)
    assert documents.take(OWN, asking(5, nice=3))
    for message, scope, why in (
        (asking(4, nice=9), OWN, "revision: 4 is older than 5"),
        (asking(5, nice=9), OWN, "revision: 5 is in force with other content"),
        (asking(9, STRANGER, nice=9), OWN, "signature: it is signed by"),
        (asking(9, scope={"group": "tills"}, nice=9), GROUP, "scope: it is for group/tills"),
        (asking(9, scope={"device": "kiosk-2"}, nice=9), OWN, "scope: it is for device/kiosk-2"),
    ):
        assert not documents.take(scope, message)
        assert documents.refused[scope].reason.startswith(why)
        assert in_force(documents) == ({"nice": 3}, OWN, 5)
    assert in_force(opened(tmp_path)) == ({"nice": 3}, OWN, 5), "nor after a start"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mqtt": None}, "configuration: key 'mqtt' = None: it cannot be changed from outside"),
        ({"state_dir": "/tmp"}, "key 'state_dir'"),
        ({"nice": "5"}, "key 'nice' = '5': it must be a whole number from 0 to 19"),
        ({"max_queue_size": 0}, "key 'max_queue_size' = 0"),
        ({"store__max_rows": True}, "key 'store.max_rows' = True"),
    ],
)
def test_a_document_is_refused_whole_and_its_revision_is_not_used_up(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    documents = opened(tmp_path)
    assert not documents.take(OWN, asking(2, log_level="debug", **settings))
    assert why in documents.refused[OWN].reason and documents.refused[OWN].revision == 2
    assert in_force(documents) is None and documents.accepted == {}
    assert documents.take(OWN, asking(2, log_level="debug")), "the next order may have the same revision"
    assert documents.refused == {}


def test_what_is_too_large_or_too_much_is_refused_before_it_is_looked_at(tmp_path: Path) -> None:
    documents = opened(tmp_path)
    assert not documents.take(OWN, b"x" * 10_000_000)
    assert documents.refused[OWN].reason == f"malformed: 10000000 bytes, at most {MAX_SIGNED_BYTES} are allowed"
    for odd in ({f"k{number}": 1 for number in range(65)}, {"log_level": "x" * 65}, {"UPPER": 1}, {"a.b.c": 1}):
        assert not documents.take(OWN, asking_all(1, dict(odd)))
        assert documents.refused[OWN].reason.startswith("malformed: ")
    assert in_force(documents) is None


def test_the_devices_own_document_wins_key_by_key_and_silence_says_nothing(tmp_path: Path) -> None:
    documents = opened(tmp_path)
    assert documents.take(GROUP, asking(1, scope={"group": "kiosks"}, nice=1, threads=2))
    assert in_force(documents) == ({"nice": 1, "threads": 2}, GROUP, 1)
    assert documents.take(OWN, asking(1, nice=3))
    assert in_force(documents) == ({"nice": 3, "threads": 2}, OWN, 1)
    assert documents.take(OWN, AUTHOR.message(2))  # a document of models only, by a tool that knows of no settings
    assert in_force(documents) == ({"nice": 1, "threads": 2}, GROUP, 1)


def test_a_signature_is_of_the_settings_too(tmp_path: Path) -> None:
    documents = opened(tmp_path)
    good, other = (msgspec.json.decode(asking(1, nice=value), type=SignedDocument) for value in (3, 9))
    swapped = msgspec.json.encode(replace(good, document=other.document))
    assert not documents.take(OWN, swapped)
    assert documents.refused[OWN].reason.startswith("signature: the signature of the key")

"""The trusted documents and keys of this device are kept on disk, so that a start needs no network.

A document is accepted when a trusted key has signed it, it is for this device or one of its groups, it is newer than
the one in force, and this agent understands it. It is on disk before it is acted upon; so its revision is remembered
across power cuts, and an older one can never come back (`edge_agent/core/reconcile.py`).

Keys are pinned by the operator's files. A document may hand trust over to other keys (`tidegate/rollout/signing.py`);
the handover is kept beside the documents, and holds until the operator's files change: then those count, since write
access to them is ownership of the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from edge_agent.core.reconcile import AcceptedRevision, refusal_reason
from tidegate import __version__
from tidegate.fleet.messages import BadMessage
from tidegate.fleet.reported import DocumentRefusal
from tidegate.models.repository import version_key
from tidegate.rollout.canonical import canonical, digest_of
from tidegate.rollout.desired import DesiredDocument, DesiredModel, decode_desired, desired_models
from tidegate.rollout.signing import Keys, SignatureRefused, keys_after, verify_document
from tidegate.storage.atomic_file import write_atomically

_MAX_WORDS: Final = 300
log = structlog.get_logger(__name__)


class TrustRecord(msgspec.Struct, frozen=True):
    pinned: str  # digest of the operator's keys under which the handover happened
    keys: dict[str, bytes]


class TrustedDocuments:
    """Blocks on the disk, so `take` runs in a thread; values that others read are replaced and never changed.

    Args:
        scopes: of this device: "device/NAME", then "group/NAME" in the order in which they count.
        pinned: the operator's keys.
    """

    def __init__(self, folder: Path, *, scopes: Sequence[str], pinned: Keys) -> None:
        self.folder = folder
        self.scopes = tuple(scopes)
        self.refused: dict[str, DocumentRefusal] = {}
        self._pinned = pinned
        self._trusted: Keys = pinned
        self._documents: dict[str, DesiredDocument] = {}
        self._held: dict[str, AcceptedRevision] = {}

    def open(self) -> None:
        """Read the documents accepted before; a damaged one is left out, and will arrive again."""
        self._trusted = self._read_trust()
        for scope in self.scopes:
            try:
                raw = self._path(scope).read_bytes()
                self._keep(scope, decode_desired(raw), raw)
            except FileNotFoundError:
                continue
            except BadMessage as error:
                log.warning("an accepted document is damaged", path=str(self._path(scope)), reason=str(error))

    @property
    def accepted(self) -> Mapping[str, int]:
        return {scope: held.revision for scope, held in self._held.items()}

    def wishes(self) -> Mapping[str, DesiredModel]:
        """The desired model on this device, by name."""
        own, *groups = self.scopes
        return desired_models(
            self._documents.get(own), [self._documents[one] for one in groups if one in self._documents]
        )

    def take(self, scope: str, message: bytes) -> bool:
        """Take in a message on a scope's topic; whether it is a new document, now in force. Raises OSError."""
        if not message:
            return False  # deleted at the broker, which needs no signature: the document stays in force
        try:
            desired, raw = verify_document(message, self._trusted)
        except SignatureRefused as error:
            return self._refuse(scope, f"signature: {error}")
        except BadMessage as error:
            return self._refuse(scope, f"malformed: {error}")
        held = self._held.get(scope)
        if why := refusal_reason(desired, digest_of(raw), held, scope=scope) or _too_new(desired):
            return self._refuse(scope, why, desired.revision)
        self.refused = {one: refused for one, refused in self.refused.items() if one != scope}
        if held is not None and held.revision == desired.revision:
            return False
        self._write_trust(desired)
        write_atomically(self._path(scope), raw, parents=True)
        self._keep(scope, desired, raw)
        log.info("a document is in force", scope=scope, revision=desired.revision)
        return True

    def _keep(self, scope: str, desired: DesiredDocument, raw: bytes) -> None:
        self._documents = {**self._documents, scope: desired}
        self._held = {**self._held, scope: AcceptedRevision(desired.revision, digest_of(raw))}

    def _refuse(self, scope: str, reason: str, revision: int = 0) -> bool:
        refused = DocumentRefusal(scope, reason[:_MAX_WORDS], revision)
        if self.refused.get(scope) != refused:
            log.warning("a document was refused", scope=scope, reason=reason)
        self.refused = {**self.refused, scope: refused}
        return False

    def _path(self, scope: str) -> Path:
        return self.folder / "desired" / f"{scope.replace('/', '+')}.json"  # no name has a plus

    def _write_trust(self, desired: DesiredDocument) -> None:
        keys = keys_after(desired, self._trusted)
        if keys != self._trusted:
            # Before the document: a cut in between lets the document come again, signed by the new keys as well.
            content = msgspec.json.encode(TrustRecord(_stamp(self._pinned), dict(keys)))
            write_atomically(self.folder / "trust.json", content, parents=True)
            self._trusted = keys
            log.warning("the keys that are trusted for documents have changed", keys=sorted(keys))

    def _read_trust(self) -> Keys:
        try:
            trust = msgspec.json.decode((self.folder / "trust.json").read_bytes(), type=TrustRecord)
        except FileNotFoundError:
            return self._pinned
        except (msgspec.MsgspecError, UnicodeError) as error:
            log.warning("the handed-over keys are damaged; the pinned ones count", reason=str(error))
            return self._pinned
        return trust.keys if trust.pinned == _stamp(self._pinned) else self._pinned

    def __repr__(self) -> str:
        return f"<TrustedDocuments {dict(self.accepted)} refused {list(self.refused)}>"


def _stamp(keys: Keys) -> str:
    return digest_of(canonical({kid: public.hex() for kid, public in keys.items()}))


def _too_new(desired: DesiredDocument) -> str:
    if desired.min_agent and version_key(__version__) < version_key(desired.min_agent):
        return f"agent: it needs an agent of {desired.min_agent}, and this is {__version__}"
    return ""

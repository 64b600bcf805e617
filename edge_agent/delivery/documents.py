"""The trusted documents and keys of this device are kept on disk, so that a start needs no network.

A document is accepted when a trusted key has signed it, it is for this device or one of its groups, it is newer than
the one in force, and this agent understands it. It is on disk before it is acted upon; so its revision is remembered
across power cuts, and an older one can never come back (`edge_agent/core/reconcile.py`).

The revision is also kept in the trust record (`trust_record.py`), in two places, and is written there before the
document: so a document that is damaged, emptied, on a bad block or replaced by an older one lowers nothing. The same
document arrives again, since it is retained, and is taken back. Where the record cannot be read, no document is
accepted.

Expiry is judged when a document arrives; one in force stays, because a device that is offline must go on. Devices may
have no clock: the time is the device's own, but never less than the latest `issued` that a trusted key has signed, and
five minutes of disagreement are forgiven. So a clock that is behind, or was set back, can delay an expiry and not undo
one that a newer document has proven; a clock that is ahead refuses, and the refusal says what time it is here.

What is refused is reported with its reason, and with the revision that it claims also where nothing vouches for that
(wrong roots, an unknown key, a document of a newer form): whoever sent this revision must not wait for it. It can be a
stranger's under the same number, so a gateway believes it only as long as this device has not accepted that revision.

Roots do not expire (`tidegate/rollout/root_chain.py`), so no clock can keep a device from the newest keys.

Keys are pinned by the operator's files. A chain of roots leads to newer ones, link by link; until there is one, a
document may hand trust over to other keys (`tidegate/rollout/signing.py`). Either is kept in the trust record, and
holds until the operator's files change: then those count, since write access to them is ownership of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog
from msgspec.structs import replace

from edge_agent.core.reconcile import AcceptedRevision, refusal_reason
from edge_agent.delivery.trust_record import RevisionFloor, TrustFile, TrustRecord, UnreadableTrust
from tidegate import __version__, clock
from tidegate.fleet.messages import BadMessage
from tidegate.fleet.reported import DocumentRefusal
from tidegate.models.repository import version_key
from tidegate.rollout.canonical import canonical, digest_of
from tidegate.rollout.desired import (
    DesiredConfiguration,
    DesiredDocument,
    DesiredModel,
    DesiredSettings,
    decode_desired,
    desired_models,
    desired_settings,
)
from tidegate.rollout.root_chain import RootLink, RootRefused, TrustedRoot, walk
from tidegate.rollout.signing import Keys, SignatureRefused, claimed_revision, keys_after, roots_in, verify_document
from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.disk_failure import is_disk_failure

_MAX_WORDS: Final = 300
_CLOCK_ERROR_S: Final = 300  # of a device with NTP, or with a clock that is set by hand
log = structlog.get_logger(__name__)


class TrustedDocuments:
    """Blocks on the disk, so `take` runs in a thread; values that others read are replaced and never changed.

    Args:
        scopes: of this device: "device/NAME", then "group/NAME" in the order in which they count.
        pinned: the operator's keys.
        utc_s: the device's clock, which may be wrong.
        why_not: why the device cannot have a configuration; "" where it can.
    """

    def __init__(
        self,
        folder: Path,
        *,
        scopes: Sequence[str],
        pinned: Keys,
        utc_s: Callable[[], float] = clock.utc_s,
        why_not: Callable[[DesiredConfiguration], str] = lambda _: "",
    ) -> None:
        self.folder = folder
        self.scopes = tuple(scopes)
        self.refused: dict[str, DocumentRefusal] = {}
        self._pinned = pinned
        self._utc_s = utc_s
        self._why_not = why_not
        # Beside the folder and in it: what empties or restores the one leaves the other.
        places = (folder / "trust.json", folder.parent / f"{folder.name}-trust.json")
        self._file = TrustFile(places, traces=folder / "desired")
        self._record = TrustRecord(_stamp(pinned), dict(pinned))
        self._closed = ""
        self._documents: dict[str, DesiredDocument] = {}
        self._held: dict[str, AcceptedRevision] = {}

    def open(self) -> None:
        """Read the documents accepted before; a damaged one is left out, and will arrive again."""
        self._open_record()
        for scope in self.scopes:
            try:
                raw = self._path(scope).read_bytes()
                self._restore(scope, decode_desired(raw), raw)
            except FileNotFoundError:
                continue
            except (OSError, BadMessage) as error:
                if isinstance(error, OSError) and not is_disk_failure(error):
                    raise
                log.warning("an accepted document is damaged", path=str(self._path(scope)), reason=str(error))
        if not self._closed:
            try:
                self._record = self._file.write(self._record)
            except OSError as error:  # a full disk must not keep the agent from its start; `take` will raise
                log.warning("the trust record cannot be written", reason=str(error))

    @property
    def accepted(self) -> Mapping[str, int]:
        return {scope: held.revision for scope, held in self._held.items()}

    def wishes(self) -> Mapping[str, DesiredModel]:
        """The desired model on this device, by name."""
        own, *groups = self.scopes
        return desired_models(
            self._documents.get(own), [self._documents[one] for one in groups if one in self._documents]
        )

    def configuration(self) -> DesiredSettings | None:
        """The desired settings on this device; None where no document says anything of them."""
        own, *groups = self.scopes
        return desired_settings(
            self._documents.get(own), [self._documents[one] for one in groups if one in self._documents]
        )

    def take(self, scope: str, message: bytes) -> bool:
        """Take in a message on a scope's topic; whether it is a new document, now in force. Raises OSError."""
        if not message:
            return False  # deleted at the broker, which needs no signature: the document stays in force
        if self._closed:
            return self.refuse(scope, message, self._closed)
        try:
            self._follow(roots_in(message))
            desired, raw = verify_document(message, self._record.keys, self._record.threshold)
            self._refuse_handover(desired)
        except RootRefused as error:
            return self.refuse(scope, message, f"root: {error}")
        except SignatureRefused as error:
            return self.refuse(scope, message, f"signature: {error}")
        except BadMessage as error:
            return self.refuse(scope, message, f"malformed: {error}")
        held = self._record.held(scope)
        why = refusal_reason(desired, digest_of(raw), held, scope=scope) or _too_new(desired)
        if scope in self._documents and held is not None and held.revision == desired.revision and not why:
            self._accept_again(scope)
            return False
        if why := why or self._expiry(desired) or self._unfit(desired):
            return self._note_refusal(scope, why, desired.revision)
        self._accept_again(scope)
        self._write_trust(scope, desired, raw)
        write_atomically(self._path(scope), raw, parents=True)
        self._keep(scope, desired, raw)
        log.info("a document is in force", scope=scope, revision=desired.revision)
        return True

    def refuse(self, scope: str, message: bytes, reason: str) -> bool:
        """Note a message that could not be taken in as refused, under the revision that it claims."""
        return self._note_refusal(scope, reason, claimed_revision(message))

    def _follow(self, chain: Sequence[RootLink]) -> None:
        """Walk to the newest root, and keep it whatever becomes of the document: older keys are gone for good."""
        record = self._record
        root = walk(TrustedRoot(record.keys, record.root, record.threshold), chain)
        if root.version > record.root:
            followed = replace(record, pinned=_stamp(self._pinned), root=root.version)
            self._record = self._file.write(replace(followed, keys=dict(root.keys), threshold=root.threshold))
            log.warning("the root of trust for documents has changed", version=root.version, keys=sorted(root.keys))

    def _refuse_handover(self, desired: DesiredDocument) -> None:
        if self._record.root > 1 and keys_after(desired, self._record.keys) != self._record.keys:
            raise RootRefused(
                f"this device follows the chain of roots, at version {self._record.root}: a document hands nothing over"
            )

    def _keep(self, scope: str, desired: DesiredDocument, raw: bytes) -> None:
        self._documents = {**self._documents, scope: desired}
        self._held = {**self._held, scope: AcceptedRevision(desired.revision, digest_of(raw))}

    def _accept_again(self, scope: str) -> None:
        self.refused = {one: refused for one, refused in self.refused.items() if one != scope}

    def _unfit(self, desired: DesiredDocument) -> str:
        """Why this device cannot be configured so; a document is refused whole."""
        configuration = desired.configuration
        why = "" if configuration is None else self._why_not(configuration)
        return f"configuration: {why}" if why else ""

    def _expiry(self, desired: DesiredDocument) -> str:
        """Why it has expired, "" while it has not."""
        here, proven = int(self._utc_s()), self._record.proven_s
        if not desired.expires_s or max(here, proven) <= desired.expires_s + _CLOCK_ERROR_S:
            return ""
        return (
            f"expired: it held until {desired.expires_s}, and it is {max(here, proven)} (UTC seconds; the clock here "
            f"says {here}, a signed document {proven}): order the rollout again, or set the clock"
        )

    def _note_refusal(self, scope: str, reason: str, revision: int) -> bool:
        refused = DocumentRefusal(scope, reason[:_MAX_WORDS], revision)
        if self.refused.get(scope) != refused:
            log.warning("a document was refused", scope=scope, reason=reason)
        self.refused = {**self.refused, scope: refused}
        return False

    def _path(self, scope: str) -> Path:
        return self.folder / "desired" / f"{scope.replace('/', '+')}.json"  # no name has a plus

    def _write_trust(self, scope: str, desired: DesiredDocument, raw: bytes) -> None:
        # Before the document: a cut in between lets the same document come again, signed by the new keys as well.
        keys = keys_after(desired, self._record.keys)
        rotated = keys != self._record.keys
        floor = RevisionFloor(desired.revision, digest_of(raw))
        self._record = self._file.write(
            replace(
                self._record,
                pinned=_stamp(self._pinned),
                keys=dict(keys),
                floors={**self._record.floors, scope: floor},
                proven_s=max(self._record.proven_s, desired.issued_s),
            )
        )
        if rotated:
            log.warning("the keys that are trusted for documents have changed", keys=sorted(keys))

    def _open_record(self) -> None:
        try:
            record = self._file.read()
        except UnreadableTrust as error:
            self._closed = str(error)
            log.error("no document is accepted", reason=self._closed)
            return
        if record is not None:
            stamp = _stamp(self._pinned)
            self._record = record if record.pinned == stamp else _pinned_again(record, stamp, self._pinned)

    def _restore(self, scope: str, desired: DesiredDocument, raw: bytes) -> None:
        """Put a document from the disk in force, unless a newer one was accepted or it is another one."""
        held = self._record.held(scope)
        if why := refusal_reason(desired, digest_of(raw), held, scope=scope):
            log.warning("an accepted document is not the newest; it is left out", scope=scope, reason=why)
            return
        if not self._closed:
            floor = RevisionFloor(desired.revision, digest_of(raw))
            self._record = replace(self._record, floors={**self._record.floors, scope: floor})
        self._keep(scope, desired, raw)

    def __repr__(self) -> str:
        return f"<TrustedDocuments {dict(self.accepted)} refused {list(self.refused)}>"


def _pinned_again(record: TrustRecord, stamp: str, pinned: Keys) -> TrustRecord:
    return replace(record, pinned=stamp, keys=dict(pinned), root=1, threshold=1)


def _stamp(keys: Keys) -> str:
    return digest_of(canonical({kid: public.hex() for kid, public in keys.items()}))


def _too_new(desired: DesiredDocument) -> str:
    if desired.min_agent and version_key(__version__) < version_key(desired.min_agent):
        return f"agent: it needs an agent of {desired.min_agent}, and this is {__version__}"
    return ""

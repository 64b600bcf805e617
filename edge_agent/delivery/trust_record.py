"""The trust record: the keys that are trusted for documents, the least revision of each scope, the latest proven time.

It is kept in two places, and each copy holds a digest of itself. One copy that is damaged or gone is written anew from
the other. Where no copy can be read, although this device has had one, it is not known whether a key was rotated away,
so no document is accepted: `UnreadableTrust`. A device that never had a document starts with the operator's keys.

Of two good copies that differ, because the power went between the writes, the one with the greater serial says which
keys count; revisions and time are the greater of both. This holds against damage and against the restoring of one of
the files. It does not hold against somebody who may write the whole state folder: that is ownership of the device.

Source: The Update Framework, specification 1.0.33, 5.2 to 5.6 (rollback and freeze attacks; trusted metadata is kept).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from edge_agent.core.reconcile import AcceptedRevision
from tidegate.rollout.canonical import canonical, digest_of
from tidegate.storage.atomic_file import write_atomically

_ADDED: Final = {"root": 1, "threshold": 1}  # fields since the first record with a digest, with their defaults
log = structlog.get_logger(__name__)


class UnreadableTrust(Exception):
    """No copy of the trust record can be read, though there was one; the text names the way out."""


class RevisionFloor(msgspec.Struct, frozen=True):
    revision: int
    digest: str


class TrustRecord(msgspec.Struct, frozen=True):
    """What must survive for a document to be judged.

    Args:
        pinned: digest of the operator's keys under which `keys` were handed over.
        floors: by scope, the newest document that was accepted.
        proven_s: UTC seconds; the latest `issued` of an accepted document, so the clock is wrong if it says less.
        root: version of the root that `keys` are of (`tidegate/rollout/root_chain.py`); 1: from the operator.
        threshold: how many of them must sign.
        digest: of the record without this field; "" in files of versions that had no floors.
    """

    pinned: str
    keys: dict[str, bytes]
    floors: dict[str, RevisionFloor] = {}
    proven_s: int = 0
    serial: int = 0
    digest: str = ""
    root: int = 1
    threshold: int = 1

    def held(self, scope: str) -> AcceptedRevision | None:
        floor = self.floors.get(scope)
        return None if floor is None else AcceptedRevision(floor.revision, floor.digest)


class TrustFile:
    """Both copies of the record. Blocks on the disk.

    Args:
        paths: of the copies, in different folders.
        traces: a folder with files that only a device with a record has.
    """

    def __init__(self, paths: Sequence[Path], traces: Path) -> None:
        self._paths = tuple(paths)
        self._traces = traces

    def read(self) -> TrustRecord | None:
        """The record; None on a device that has had none.

        Raises:
            UnreadableTrust: it had one, and no copy can be read.
        """
        found = {path: _read(path) for path in self._paths}
        good = [record for record in found.values() if isinstance(record, TrustRecord)]
        if not good:
            if any(isinstance(one, str) for one in found.values()) or any(self._traces.glob("*.json")):
                raise UnreadableTrust(self._refusal(found))
            return None
        for path, record in found.items():
            if isinstance(record, str):
                log.warning(
                    "a copy of the trust record is damaged; the other one counts", path=str(path), reason=record
                )
        newest = max(good, key=lambda record: record.serial)
        for record in good:
            newest = _merged(newest, record)
        return newest

    def write(self, record: TrustRecord) -> TrustRecord:
        """Write the next record into each place; it is in force once the first is written. Raises OSError."""
        numbered = replace(record, serial=record.serial + 1, digest="")
        sealed = replace(numbered, digest=_digest(numbered))
        for path in self._paths:
            write_atomically(path, msgspec.json.encode(sealed), parents=True)
        return sealed

    def _refusal(self, found: Mapping[Path, TrustRecord | str | None]) -> str:
        says = ", ".join(f"{path} is {'missing' if record is None else 'damaged'}" for path, record in found.items())
        return (
            f"trust: {says}, so it is unknown which keys were rotated away; no document is accepted until a copy is "
            f"restored, or both and {self._traces} are removed, after which the keys in rollout.keys count again"
        )

    def __repr__(self) -> str:
        return f"<TrustFile {' and '.join(map(str, self._paths))}>"


def _read(path: Path) -> TrustRecord | str | None:
    """The record, why it is damaged, or None for no file."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=TrustRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return str(error) or type(error).__name__
    if not record.digest:
        # Before there were floors the file was the handover alone; afterwards every file has a serial and a digest.
        return record if record.serial == 0 and not record.floors else "it has no digest"
    return record if _digest(replace(record, digest="")) == record.digest else "its digest is wrong"


def _digest(record: TrustRecord) -> str:
    """Of the record without a digest. What files of earlier versions lack is left out while it says nothing."""
    fields = msgspec.to_builtins(record)
    return digest_of(canonical({name: one for name, one in fields.items() if _ADDED.get(name) != one}))


def _merged(newest: TrustRecord, other: TrustRecord) -> TrustRecord:
    floors = dict(newest.floors)
    for scope, floor in other.floors.items():
        if scope not in floors or floors[scope].revision < floor.revision:
            floors[scope] = floor
    return replace(newest, floors=floors, proven_s=max(newest.proven_s, other.proven_s))

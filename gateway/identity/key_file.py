"""The key file holds the hashes of API keys: read whole, written atomically, writable by its owner alone.

`tidegate keys` writes it and gateways read it, at the same time and without coordination. So a writer holds a lock
file beside it, writes a new file, and renames that into place: a reader sees the old file or the new one. A hash
is no credential, so others may read the file; by writing it they could add a key, so a file that is writable for
group or others is refused.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from gateway.core.access.api_key import SECRET_BYTES, KeyRecord, KeyVerifier
from tidegate.config import ConfigError
from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.file_owner import FileOwner, kept
from tidegate.storage.output_file import output_path

FORMAT: Final = 1
MOST_BYTES: Final = 64 * 2**20


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    keys: tuple[KeyRecord, ...]


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """Return every record. Raises ConfigError: the file is unreadable, malformed, or writable for others."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(f"others than its owner may write the keys file {path}: chmod 600 {path}")
            size = os.fstat(file.fileno()).st_size  # a read allocates its whole limit, so the limit is the size
            text = file.read(min(size, MOST_BYTES) + 1)
    except OSError as error:
        hint = "; make one with `tidegate keys create`" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the keys file {path}: {error.strerror}{hint}") from error
    if len(text) > MOST_BYTES:
        raise ConfigError(f"the keys file {path} has more than {MOST_BYTES} bytes")
    return _decoded(path, text).keys


@contextmanager
def edit_keys(path: Path, owner: FileOwner | None = None) -> Iterator[dict[str, KeyRecord]]:
    """Yield the records by id, to be changed under the lock; they are written if the block ends without an error.

    Args:
        owner: whose file it is then; None: whose it was.
    """
    try:
        path = output_path(path)
    except OSError as error:
        raise ConfigError(f"cannot write the keys file {path}: {error.strerror}") from error
    with _locked(path):
        records = {one.id: one for one in read_keys(path)} if path.exists() else {}
        yield records
        text = msgspec.json.encode(KeyFile(FORMAT, tuple(records.values())))
        _write(path, msgspec.json.format(text, indent=2), owner)


def _decoded(path: Path, text: bytes) -> KeyFile:
    try:
        found = msgspec.json.decode(text, type=KeyFile)
        for one in found.keys:
            KeyVerifier(one).opens(bytes(SECRET_BYTES), 0.0)  # finds an unusable salt or digest now
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no file of keys: {error}") from error
    if found.format != FORMAT:
        raise ConfigError(f"the keys file {path} has format {found.format}; this version reads {FORMAT}")
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write beside {path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: bytes, owner: FileOwner | None) -> None:
    try:
        # Root revokes keys of a gateway that runs as another user: a file that is root's now, it could not read.
        write_atomically(path, text + b"\n", mode=0o600, owner=owner.ids if owner else kept(path))
    except OSError as error:
        raise ConfigError(f"cannot write the keys file {path}: {error.strerror}") from error

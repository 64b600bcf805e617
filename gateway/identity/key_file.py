"""The file of API keys: read whole, written atomically, for its owner alone.

`tidegate keys` writes it and gateways read it, at the same time and with no word between them. So a writer holds a lock
beside the file while it changes it, writes another file, and puts that in its place: a reader sees the old one or the
new one. What is in it are hashes, so reading it opens nothing; writing it does, hence a file that others may write is
refused.
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

FORMAT: Final = 1
MOST_BYTES: Final = 64 * 2**20


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    keys: tuple[KeyRecord, ...]


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """Every record. Raises ConfigError: it cannot be read, is no such file, or others may write it."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(f"others than its owner may write the keys file {path}: chmod 600 {path}")
            size = os.fstat(file.fileno()).st_size  # asked for first: a read sets aside as much as it might bring
            text = file.read(min(size, MOST_BYTES) + 1)
    except OSError as error:
        hint = "; make one with `tidegate keys create`" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the keys file {path}: {error.strerror}{hint}") from error
    if len(text) > MOST_BYTES:
        raise ConfigError(f"the keys file {path} has more than {MOST_BYTES} bytes")
    return _decoded(path, text).keys


@contextmanager
def edit_keys(path: Path) -> Iterator[dict[str, KeyRecord]]:
    """The records by id, to be changed; written when the block ends well. Nobody else changes them meanwhile."""
    with _locked(path):
        records = {one.id: one for one in read_keys(path)} if path.exists() else {}
        yield records
        _write(path, msgspec.json.format(msgspec.json.encode(KeyFile(FORMAT, tuple(records.values()))), indent=2))


def _decoded(path: Path, text: bytes) -> KeyFile:
    try:
        found = msgspec.json.decode(text, type=KeyFile)
        for one in found.keys:
            KeyVerifier(one).opens(bytes(SECRET_BYTES), 0.0)  # a salt or a digest that cannot be used is found out here
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


def _write(path: Path, text: bytes) -> None:
    try:
        write_atomically(path, text + b"\n", mode=0o600)
    except OSError as error:
        raise ConfigError(f"cannot write the keys file {path}: {error.strerror}") from error

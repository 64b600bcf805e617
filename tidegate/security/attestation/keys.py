"""Attestation keys on disk: a target's own, and the list of those that a gateway allows.

    KEY        PEM, Ed25519, readable by the target alone; `tidegate attest init` makes it
    ALLOWED    a line a key, `ed25519 BASE64 words`; what follows a `#` is for people, and so are the words

A key that is taken off the list is no longer trusted: gateways follow the file.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tidegate.config import ConfigError
from tidegate.security.attestation.software import KEY_BYTES, key_id
from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.file_owner import FileOwner

MOST_BYTES: Final = 2**20
_ALGORITHM: Final = "ed25519"


def make_key(path: Path, owner: FileOwner | None = None) -> Ed25519PrivateKey:
    """A new key in a file for its owner alone, by default this process's user.

    Raises:
        ConfigError: there is one already, or it cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists: a key that was allowed somewhere is not replaced; remove it first")
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, pem, mode=0o600, owner=owner.ids if owner else None)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    return key


def read_key(path: Path, what: str = "attestation key", maker: str = "tidegate attest init") -> Ed25519PrivateKey:
    """Raises ConfigError: it cannot be read, others may read it, or it is no Ed25519 key.

    Args:
        what, maker: for the errors: what it is, and the command that makes one.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                if file.peek(len(_ALGORITHM)).startswith(_ALGORITHM.encode()):
                    raise ConfigError(f"{path} is no {what}: it is the public half of one")
                raise ConfigError(f"others than its owner may use the {what} {path}: chmod 600 {path}")
            pem = file.read(MOST_BYTES)
    except OSError as error:
        hint = f"; `{maker} {path}` makes one" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}{hint}") from error
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no {what}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is no {what}: it is not of Ed25519; `{maker}` makes one")
    return key


def line_of(key: Ed25519PrivateKey, words: str) -> str:
    """The key's line in a list of allowed ones."""
    return f"{_ALGORITHM} {base64.b64encode(key.public_key().public_bytes_raw()).decode()} {words}".rstrip()


def read_allowed(path: Path, *, what: str = "attestation keys") -> dict[str, bytes]:
    """The public keys by id. Raises ConfigError: it cannot be read, others may write it, or a line is no key.

    Args:
        what: the keys are, for errors.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(f"others than its owner may write the list of {what} {path}: chmod go-w it")
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the list of {what} {path}: {error.strerror}") from error
    if len(text) > MOST_BYTES:
        raise ConfigError(f"the list of {what} {path} has more than {MOST_BYTES} bytes")
    allowed: dict[str, bytes] = {}
    for number, line in enumerate(text.decode(errors="replace").splitlines(), start=1):
        if words := line.partition("#")[0].split():
            public = _public(words, f"{path}:{number}")
            allowed[key_id(public)] = public
    return allowed


def _public(words: list[str], where: str) -> bytes:
    try:
        public = base64.b64decode(words[1], validate=True) if len(words) > 1 and words[0] == _ALGORITHM else b""
    except binascii.Error:
        public = b""
    if len(public) != KEY_BYTES:
        raise ConfigError(f"{where}: not a line as `tidegate attest show` prints it, `{_ALGORITHM} BASE64 words`")
    return public

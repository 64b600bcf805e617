"""A folder of files becomes a release by `seal` and `sign`, and is held to what it says by `verify`.

    files  ←  SHA256SUMS lists each  ←  provenance.json names each, and SHA256SUMS  ←  provenance.intoto.jsonl signs it

`verify` goes the other way, from what is trusted (a key) to the files: the signature, the statement, the list, the
files. Nothing that a signature does not reach is believed, and every file that is there has to be reached: a stranger's
file beside good ones is refused, since whoever installs `*.whl` would install it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tidegate.rollout.canonical import digest_of
from tidegate.rollout.signing import Keys, id_of
from tidegate.storage.atomic_file import write_atomically
from tidegate.tools.release.checksums import (
    ENVELOPE,
    STATEMENT,
    SUMS,
    Digests,
    ReleaseRefused,
    decode_sums,
    differences,
    digests_of,
    encode_sums,
    read_bounded,
)
from tidegate.tools.release.envelope import EnvelopeSignature, read_envelope, signed, signers
from tidegate.tools.release.statement import ReleaseStatement, make_statement, read_statement


@dataclass(frozen=True, slots=True)
class VerifiedRelease:
    """What a release is, once it was held to what it says."""

    files: int  # without the three that speak of the others
    statement: ReleaseStatement | None = None  # None: only the list was held against the files
    signers: tuple[str, ...] = ()  # ids of the trusted keys that signed it


@dataclass(frozen=True, slots=True)
class ReleaseOrigin:
    """What a builder states of a release: `statement.make_statement` says what each is."""

    version: str
    builder: str
    commit: str
    materials: Digests


def seal(folder: Path, origin: ReleaseOrigin | None) -> None:
    """Write `SHA256SUMS`, and with an origin `provenance.json`, for the files that are there.

    Raises:
        ReleaseRefused: something in the folder is no file of a release, or there is none.
        ValueError: the origin has no builder's URI, or no commit.
    """
    digests = digests_of(folder)
    if not digests:
        raise ReleaseRefused(f"{folder}: there is no file to seal")
    sums = encode_sums(digests)
    write_atomically(folder / SUMS, sums, mode=0o644)
    if origin is not None:
        files = {**digests, SUMS: digest_of(sums)}
        raw = make_statement(origin.version, origin.builder, origin.commit, origin.materials, files)
        write_atomically(folder / STATEMENT, raw + b"\n", mode=0o644)


def sign(folder: Path, key: Ed25519PrivateKey) -> str:
    """Sign the statement of a release whose files are as it says, beside signatures that are there; the key's id.

    Raises:
        ReleaseRefused: its files are not as it says, it has no statement, or others signed another statement.
        OSError: the envelope cannot be written.
    """
    payload = _statement_bytes(folder)
    verify_statement(folder, payload)
    others: tuple[EnvelopeSignature, ...] = ()
    if (folder / ENVELOPE).exists():
        envelope = read_envelope(read_bounded(folder / ENVELOPE))
        if envelope.payload != payload:
            raise ReleaseRefused(f"{ENVELOPE}: it signs another statement than {STATEMENT}: remove it, or build again")
        others = envelope.signatures
    write_atomically(folder / ENVELOPE, signed(payload, key, others), mode=0o644)
    return id_of(key)


def verify(folder: Path, trusted: Keys) -> VerifiedRelease:
    """Hold a release to what a trusted key signed.

    Raises:
        ReleaseRefused: no trusted key signed it, or a file is changed, missing, or was added.
    """
    envelope = read_envelope(read_bounded(folder / ENVELOPE))
    good = signers(envelope, trusted)
    if _statement_bytes(folder) != envelope.payload:
        raise ReleaseRefused(f"{STATEMENT}: changed: it is not the statement that was signed")
    statement, files = verify_statement(folder, envelope.payload)
    return VerifiedRelease(files, statement, tuple(good))


def verify_statement(folder: Path, payload: bytes) -> tuple[ReleaseStatement, int]:
    """Hold the list and the files to a statement; the statement, and how many files. Raises ReleaseRefused."""
    statement = read_statement(payload)
    sums = read_bounded(folder / SUMS)
    wanted = statement.digests[SUMS]
    if digest_of(sums) != wanted:
        raise ReleaseRefused(f"{SUMS}: changed: its SHA-256 is {digest_of(sums)}, and the statement has {wanted}")
    listed = decode_sums(sums)
    if listed != {name: digest for name, digest in statement.digests.items() if name != SUMS}:
        raise ReleaseRefused(f"{STATEMENT}: it and {SUMS} speak of different files")
    _hold(folder, listed)
    return statement, len(listed)


def verify_checksums(folder: Path) -> VerifiedRelease:
    """Hold the files to `SHA256SUMS` alone, as `sha256sum --check` would, and refuse added ones besides.

    Raises:
        ReleaseRefused: a file is changed, missing, or was added.
    """
    listed = decode_sums(read_bounded(folder / SUMS))
    _hold(folder, listed)
    return VerifiedRelease(len(listed))


def _hold(folder: Path, listed: Digests) -> None:
    if wrong := differences(listed, digests_of(folder)):
        raise ReleaseRefused("\n".join(wrong))


def _statement_bytes(folder: Path) -> bytes:
    """The statement without the line's end."""
    return read_bounded(folder / STATEMENT).removesuffix(b"\n")

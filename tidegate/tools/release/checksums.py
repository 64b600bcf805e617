"""`SHA256SUMS` lists the files of a release as `sha256sum` writes and checks them, and is read without trust.

A release is one flat folder of plain files. A folder in it, a link or a pipe is refused before anything is read, so a
list or a folder that a stranger made can lead to no file elsewhere and can make no reader wait. Images have gigabytes:
files are hashed in pieces.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SUMS: Final = "SHA256SUMS"
STATEMENT: Final = "provenance.json"
ENVELOPE: Final = "provenance.intoto.jsonl"
# They speak of the others. The list itself is a subject of the statement, and the envelope holds the statement.
ABOUT_OTHERS: Final = frozenset({SUMS, STATEMENT, ENVELOPE})
# What it means that one of them is not there.
_ABSENT: Final = {
    SUMS: "nothing says which files the release has",
    STATEMENT: "nothing says what it was made of; `make dist` writes it where BUILDER names the builder",
    ENVELOPE: "the release is not signed, so nothing says who made it; `tidegate release sign` signs it",
}
MOST_FILES: Final = 1000
MOST_BYTES: Final = 2**20  # of each of the three
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+~-]{0,199}\Z")
_LINE: Final = re.compile(r"([0-9a-f]{64}) [ *](.+)\Z")
Digests = Mapping[str, str]  # SHA-256 as 64 hexadecimal digits, by the file's name


class ReleaseRefused(ValueError):
    """A release that is not what it says; the text names each file and what is wrong with it."""


def digests_of(folder: Path) -> dict[str, str]:
    """The digest of every file in the folder but the three that speak of the others. It blocks: it reads all.

    Raises:
        ReleaseRefused: something in it is no plain file, or is no name for one of a release, or cannot be read.
    """
    return {path.name: digest_of_file(path) for path in release_files(folder) if path.name not in ABOUT_OTHERS}


def release_files(folder: Path) -> list[Path]:
    """Every file of a release, by name. Raises ReleaseRefused as `digests_of` does."""
    try:
        found = sorted(folder.iterdir())
    except OSError as error:
        raise ReleaseRefused(f"cannot read the release {folder}: {error.strerror}") from error
    if len(found) > MOST_FILES:
        raise ReleaseRefused(f"{folder}: {len(found)} files, at most {MOST_FILES} are read: is it a release?")
    # A name that is none is shown as `repr` has it: a terminal would act on what may stand in it.
    wrong = [f"{path.name!r}: no name for a file of a release" for path in found if not _NAME.match(path.name)]
    named = [path for path in found if _NAME.match(path.name)]
    wrong += [f"{path.name}: not a plain file, so no part of a release" for path in named if not _is_plain(path)]
    if wrong:
        raise ReleaseRefused("\n".join(wrong))
    return found


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits. Raises ReleaseRefused: it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ReleaseRefused(f"{path.name}: cannot be read: {error.strerror}") from error


def read_bounded(path: Path) -> bytes:
    """The content of one of the three files. Raises ReleaseRefused: it is missing, or larger than any of them."""
    if not os.path.lexists(path):
        raise ReleaseRefused(f"{path.name}: missing: {_ABSENT[path.name]}")
    if not _is_plain(path):
        raise ReleaseRefused(f"{path.name}: not a plain file, so no part of a release")
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ReleaseRefused(f"{path.name}: cannot be read: {error.strerror}") from error
    if len(raw) > MOST_BYTES:
        raise ReleaseRefused(f"{path.name}: more than {MOST_BYTES} bytes")
    return raw


def encode_sums(digests: Digests) -> bytes:
    """The content of `SHA256SUMS`, sorted by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())).encode()


def decode_sums(raw: bytes) -> dict[str, str]:
    """The digests that `SHA256SUMS` lists. Raises ReleaseRefused: a line is none, or a name stands there twice."""
    digests: dict[str, str] = {}
    for number, line in enumerate(raw.decode(errors="replace").splitlines(), start=1):
        found = _LINE.match(line)
        if found is None or not _NAME.match(found[2]) or found[2] in ABOUT_OTHERS:
            raise ReleaseRefused(f"{SUMS}:{number}: not a line as sha256sum writes it, for a file of a release")
        if found[2] in digests:
            raise ReleaseRefused(f"{SUMS}:{number}: {found[2]} stands there twice")
        digests[found[2]] = found[1]
    if not digests:
        raise ReleaseRefused(f"{SUMS}: it lists no file")
    return digests


def differences(listed: Digests, found: Digests) -> list[str]:
    """What differs between a list and the files that are there, a line each; empty when nothing does."""
    return [
        *(f"{name}: missing" for name in sorted(listed.keys() - found.keys())),
        *(f"{name}: not in the release, so remove it or fetch the release again"
          for name in sorted(found.keys() - listed.keys())),
        *(f"{name}: changed: its SHA-256 is {found[name]}, and the release has {listed[name]}"
          for name in sorted(listed.keys() & found.keys()) if listed[name] != found[name]),
    ]  # fmt: skip


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False

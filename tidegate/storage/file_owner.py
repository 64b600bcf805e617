"""A file's owner is the system's user whose service reads the file, which is seldom the user that writes it.

Commands run as root write keys with mode 0600, and services read them as `tidegate` or `mosquitto`. So such a command
gives its files to their reader, and tries in the end whether that user can read them: a mode is not enough where a
folder above the file is closed to that user.

`kept` is for files that are written anew (a renewed key, a list of keys): they stay their reader's. It trusts a folder
only when no stranger can write there, since a stranger could leave a file of its own in wait for a key.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LOOK_WITHIN_S: Final = 10.0
# Prints what the user that runs it cannot enter (folders) or read (files).
_LOOK: Final = 'for f do if [ -d "$f" ]; then [ -x "$f" ]; else [ -r "$f" ]; fi || printf "%s\\n" "$f"; done'


@dataclass(frozen=True, slots=True)
class FileOwner:
    """A user and a group of this machine."""

    user: str
    uid: int
    gid: int

    @classmethod
    def parse(cls, text: str) -> FileOwner:
        """From USER or USER:GROUP. Raises ValueError for an unknown name, or when only root could give files to it."""
        user, colon, group = text.partition(":")
        try:
            found = pwd.getpwnam(user)
        except KeyError:
            raise ValueError(
                f"there is no user {user!r} here: make it first (deploy/systemd/tidegate.sysusers with "
                "`systemd-sysusers`, or the package of its service), or name another"
            ) from None
        try:
            gid = grp.getgrnam(group).gr_gid if colon else found.pw_gid
        except KeyError:
            raise ValueError(f"there is no group {group!r} here") from None
        if os.geteuid() not in (0, found.pw_uid):
            raise ValueError(f"only root can give files to {user!r}: run it with sudo")
        return cls(user, found.pw_uid, gid)

    @classmethod
    def known(cls, user: str) -> FileOwner | None:
        """The user of this name, where we are root and it exists."""
        try:
            return cls.parse(user) if os.geteuid() == 0 else None
        except ValueError:
            return None

    @property
    def ids(self) -> tuple[int, int]:
        return self.uid, self.gid

    def closed(self, files: Iterable[Path]) -> list[Path]:
        """The files that this user cannot read; instead of a file, the folder above it which the user cannot enter."""
        found: list[Path] = []
        for file in files:
            path = file.absolute()
            barred = self._barred([*reversed(path.parents), path])
            found += [one for one in barred[:1] if one not in found]
        return found

    def _barred(self, paths: Sequence[Path]) -> list[Path]:
        if os.geteuid() != 0:
            return [one for one in paths if not os.access(one, os.X_OK if one.is_dir() else os.R_OK)]
        looked = subprocess.run(
            ["/bin/sh", "-c", _LOOK, "sh", *map(str, paths)],
            user=self.uid, group=self.gid, extra_groups=os.getgrouplist(self.user, self.gid), cwd="/",
            capture_output=True, timeout=_LOOK_WITHIN_S, check=False,
        )  # fmt: skip
        return [Path(line) for line in looked.stdout.decode(errors="surrogateescape").splitlines()]

    def why_closed(self, files: Iterable[Path]) -> str:
        """What keeps this user from reading the files, with the way out; "" when it can read them all."""
        return "; ".join(self._words(path) for path in self.closed(files))

    def _words(self, path: Path) -> str:
        try:
            mode = stat.filemode(path.stat().st_mode)
        except OSError as error:
            return f"{path}: {error.strerror}"
        shown = shlex.quote(str(path))
        if path.is_dir():
            return f"{self.user} cannot enter {path} ({mode}): `chmod a+x {shown}`, or choose another folder"
        return f"{self.user} cannot read {path} ({mode}): `chown {self.user} {shown}`"

    def __str__(self) -> str:
        return self.user


def kept(path: Path) -> tuple[int, int] | None:
    """The owner that a file about to be written anew shall keep; None where there is no file, or we are not root."""
    if os.geteuid() != 0:
        return None
    try:
        old, folder = path.lstat(), path.parent.stat()
    except OSError:
        return None
    if not stat.S_ISREG(old.st_mode) or folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    if folder.st_uid not in (0, old.st_uid):
        return None
    return old.st_uid, old.st_gid

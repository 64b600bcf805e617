"""The operator's token lets an account of this machine change a running gateway, and no other account.

A loopback port is open to every account of its machine, so a connection proves nothing. A gateway without `auth`
therefore makes a token at each start, writes it to a file of its own account (mode 0600), and requires it for
every request that changes something. Commands of the same account, and root's, find the file by the admin port:

    FOLDER/admin-PORT.token    in $RUNTIME_DIRECTORY, $STATE_DIRECTORY (systemd), $XDG_RUNTIME_DIR/tidegate,
                               /run/user/UID/tidegate, /run/tidegate, /tmp/tidegate-UID: the first that can be used

The token is new at each start and its file goes with the gateway: another program that takes the port of a gateway that
has ended, and is shown the token by a command, has learned nothing. Commands show it to loopback addresses only.
"""

from __future__ import annotations

import glob
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tidegate.servers.address import is_loopback
from tidegate.storage.atomic_file import write_atomically

FILE_VARIABLE: Final = "TIDEGATE_ADMIN_TOKEN_FILE"
_PREFIX: Final = "tgop_"
_TOKEN: Final = re.compile(rf"{_PREFIX}[A-Za-z0-9_-]{{43}}\Z", re.ASCII)  # 256 bits
_MOST_BYTES: Final = 256
_BEARER: Final = "bearer "


class OperatorToken:
    """One gateway's token. Mutable: `path`, where it was published; None: nowhere yet, so that no request has it."""

    def __init__(self) -> None:
        self.value = _PREFIX + secrets.token_urlsafe(32)
        self.path: Path | None = None

    def admits(self, authorization: str) -> bool:
        """Whether the header `Authorization` holds the token; compared in constant time."""
        shown = authorization[len(_BEARER) :].strip() if authorization[: len(_BEARER)].lower() == _BEARER else ""
        return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), self.value.encode())

    def publish(self, port: int, path: Path | None = None) -> None:
        """Write the file, at `path` or in the first folder that can be used.

        Raises:
            OSError: it can be written nowhere; the error is that of the last place.
        """
        error: OSError | None = None
        for place in [path] if path is not None else [folder / file_name(port) for folder in private_folders()]:
            try:
                if path is None:
                    _make_private(place.parent)
                write_atomically(place, self.value.encode() + b"\n", mode=0o600, durable=False)
            except OSError as failed:
                error = failed
            else:
                self.path = place
                return
        raise error or FileNotFoundError("there is no folder for it")

    def withdraw(self) -> None:
        """Remove the file, unless another gateway has written its own there."""
        path, self.path = self.path, None
        if path is not None and _read(path) == self.value:
            with suppress(OSError):
                path.unlink()

    def __repr__(self) -> str:
        return f"<OperatorToken in {self.path}>"


def file_name(port: int) -> str:
    return f"admin-{port}.token"


def private_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders that a process of this account tries, in order."""
    uid = os.getuid()
    managed = [environ.get(name, "").partition(":")[0] for name in ("RUNTIME_DIRECTORY", "STATE_DIRECTORY")]
    session = environ.get("XDG_RUNTIME_DIR", "")
    return [
        *(Path(folder) for folder in managed if folder),
        *([Path(session, "tidegate")] if session else []),
        Path(f"/run/user/{uid}/tidegate"),
        Path("/run/tidegate"),
        Path(f"/tmp/tidegate-{uid}"),  # its owner and its mode are checked
    ]


def token_for(address: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the token for the gateway whose admin port this is; None: it is not here, or not for this account.

    The newest file counts: one that a killed gateway left behind must not hide that of its successor.

    Raises:
        OSError: the file that the environment names cannot be read.
        ValueError: what it holds is no token.
    """
    named = environ.get(FILE_VARIABLE)
    if named:
        token = Path(named).read_text(errors="replace")[:_MOST_BYTES].strip()
        if not _TOKEN.match(token):
            raise ValueError("it holds no operator's token")
        return token
    parts = urlsplit(address)
    if not is_loopback(parts.hostname or ""):
        return None
    found = [(at, token) for path in _places(parts.port or 80, environ) for at, token in _dated(path)]
    return max(found, default=(0.0, None))[1]


def _places(port: int, environ: Mapping[str, str]) -> Iterator[Path]:
    folders = [*private_folders(environ), Path("/var/lib/tidegate")]  # a unit's `StateDirectory=tidegate`
    if os.getuid() == 0:
        others = (*glob.glob("/run/user/*/tidegate"), *glob.glob("/tmp/tidegate-*"))
        folders += [Path(other) for other in others]
    yield from dict.fromkeys(folder / file_name(port) for folder in folders)


def _dated(path: Path) -> Iterator[tuple[float, str]]:
    if (token := _read(path)) is not None:
        with suppress(OSError):
            yield path.stat().st_mtime, token


def _read(path: Path) -> str | None:
    """Return the token in a file of this account (or of any, for root) that no other account may write."""
    try:
        # No links: /tmp is everybody's, and a link there could lead to any file of ours. A pipe must not block either.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        ours = os.getuid() in (0, about.st_uid)
        if not stat.S_ISREG(about.st_mode) or not ours or about.st_mode & 0o022:
            return None
        token = file.read(_MOST_BYTES).decode(errors="replace").strip()
    return token if _TOKEN.match(token) else None


def _make_private(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder of this account alone")

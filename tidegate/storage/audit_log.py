"""The audit log records each change that a command made: one JSON line beside the changed file, and on stderr.

A terminal gets no line: its reader ran the command, has its answer, and finds the line in the file. It gets the line
only if the file cannot be written.

A gateway's own audit (`gateway/identity/audit.py`) sees requests. Keys and models are changed by commands, on files
that several processes read, so their audit log lies beside the files, and a copy of the folder has its history.

    keys.json       →  keys.audit.jsonl
    models/         →  models/audit.jsonl

    {"audit":"key-revoked","at":"2026-11-20T21:03:26+00:00","who":"os:alice","uid":1000,"id":"3f9a0c11d2e4"}

`who` is the account that the process runs as, read from the system and not from the environment, which any user can
set; under sudo that is root. Lines are only ever appended, each in one write, and the file is its owner's alone. A line
of which a full disk took only the beginning stays as it is: its command says so, and the next line begins on its own.

Limit: an account that may write the files may also edit them by hand, which leaves no line, and may edit the log.
Where that matters, send stderr (or the file) to a place that this account cannot write.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tidegate import clock


def note(trail: Path, action: str, **what: Any) -> None:
    """Append one line about a change that was made, to stderr first unless it is a terminal.

    Raises:
        click.ClickException: the change was made, and the file cannot be written.
    """
    uid = os.getuid()
    at = datetime.fromtimestamp(clock.utc_s(), UTC).isoformat(timespec="seconds")
    line = json.dumps(
        {"audit": action, "at": at, "who": f"os:{_name_of(uid)}", "uid": uid, **what}, separators=(",", ":")
    )
    watched = sys.stderr.isatty()
    if not watched:
        print(line, file=sys.stderr, flush=True)
    try:
        _append(trail, f"{line}\n".encode())
    except OSError as error:
        if watched:
            print(line, file=sys.stderr, flush=True)
        raise click.ClickException(
            f"{action} is done, but could not be noted in {trail}: {error.strerror}; the line on stderr is all there is"
        ) from error


def beside(path: Path) -> Path:
    """The audit log of one file: `keys.audit.jsonl` of `keys.json`."""
    return path.with_name(f"{path.stem}.audit.jsonl")


def of_repository(root: Path) -> Path:
    return root / "audit.jsonl"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container's account that has no name
        return str(uid)


def _append(trail: Path, line: bytes) -> None:
    """Raises OSError: the line is not there, or only its beginning is."""
    # No links: in a folder that others may write, one could lead the line into a file of ours.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(trail, flags, 0o600)
    try:
        if not _is_at_line_start(descriptor):
            line = b"\n" + line
        # Less is written where the disk is full. The rest is not tried: another process's line could come between.
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(trail))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_at_line_start(descriptor: int) -> bool:
    size_bytes = os.fstat(descriptor).st_size
    return not size_bytes or os.pread(descriptor, 1, size_bytes - 1) == b"\n"

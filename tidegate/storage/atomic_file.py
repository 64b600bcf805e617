"""Every file that a reader must never see half-written is replaced by the functions of this module.

    write_atomically   bytes under a name: the whole new content, or the whole old one
    replacing          the same for a writer that needs a path of its own to write to
    move_durably       a finished file gets its name
    link_atomically    a symbolic link gets a new target

Each writes to a hidden file in the same folder, flushes it to the disk, renames it, and flushes the folder, since a
power cut can undo the rename too. `durable=False` leaves out both flushes: readers still never see half a file, but
after a power cut the file may be empty. That is for content which is written every second or can be measured again.

The hidden file (`.NAME.RANDOM.new`) has a name of its own, so that several processes may write one path; the last
rename wins. It is removed when the write fails, and stays behind only when the process or the machine is killed in the
middle of the write. Everything here blocks for the disk.

Only a file or a link is replaced: renaming would put a file where a device is, and root may do that. A link is replaced
itself; where a user named it, `output_file.py` follows it first.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_atomically(
    path: Path,
    content: bytes,
    *,
    mode: int | None = None,
    owner: tuple[int, int] | None = None,
    durable: bool = True,
    parents: bool = False,
) -> None:
    """Replace the content of `path`.

    Args:
        mode: the file's exact permissions, which no reader exceeds at any moment; None leaves them to the umask.
        owner: the user and the group (ids) that the file belongs to before it holds anything; None: this process's.
        durable: whether the content must survive a power cut.
        parents: whether to make the folder when it does not exist.

    Raises:
        OSError: the old content is still there.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=durable) as temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666 if mode is None else 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if owner is not None and owner != (os.geteuid(), os.getegid()):
                os.fchown(descriptor, *owner)
            if mode is not None:
                os.fchmod(descriptor, mode)
            file.write(content)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a path that does not exist yet; the file written there replaces `path` when the block ends well.

    Raises:
        OSError: the old file is still there; the error names `path`.
    """
    check_replaceable(path)
    temporary = _hidden_beside(path)
    try:
        yield temporary
        if durable:
            move_durably(temporary, path)
        else:
            os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            _name(error, path, temporary)
        raise


def check_replaceable(path: Path) -> None:
    """Raises OSError for what a rename must not take the place of: a folder, a device, a pipe or a socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise OSError(errno.EINVAL, "is no regular file, and would be replaced by one", str(path))


def _name(error: OSError, path: Path, temporary: Path) -> None:
    """Let the error say which file it is about: a full disk names none, and nobody knows the hidden file."""
    if error.errno is not None and error.filename in (None, str(temporary), temporary):
        error.filename = str(path)
        del error.filename2  # set to None, it would be a part of the error's words: "'state.json' -> None"


def move_durably(source: Path, path: Path) -> None:
    """Rename `source` to `path`, on the same file system, once its content is on the disk. Raises OSError."""
    sync_file(source)
    os.replace(source, path)
    sync_folder(path.parent)


def link_atomically(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`. Raises OSError; then `path` is what it was."""
    temporary = _hidden_beside(path)
    os.symlink(target, temporary)
    try:
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Return once the file's content is on the disk. Raises OSError."""
    _sync(path)


def sync_folder(folder: Path) -> None:
    """Return once what was made, renamed or removed in the folder is on the disk. Raises OSError."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")

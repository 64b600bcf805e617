"""What the operating system refuses a command is one line for its user: the file and the reason, not a traceback.

A full disk, missing rights and a wrong path are the user's to mend. An error without a number is none of the system's
(a `TimeoutError` of our own), so it stays a defect; and a pipe whose reader has ended is no error of a command: click
ends quietly there.
"""

from __future__ import annotations

import errno
from typing import Final

_OF_WRITING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def one_line(error: OSError) -> str:
    """`FILE: reason`, or the reason alone where the system names no file. Raises again what no user can mend."""
    if not error.errno or not error.strerror or error.errno == errno.EPIPE:
        raise error
    # Of two files the second is the one that is written: `shutil.copyfile` names the source first.
    name = error.filename2 if error.filename2 is not None and error.errno in _OF_WRITING else error.filename
    named = name.decode(errors="replace") if isinstance(name, bytes) else name
    return f"{named}: {error.strerror}" if named is not None else str(error.strerror)

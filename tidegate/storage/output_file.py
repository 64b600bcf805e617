"""An output file that a user names may be a link, and must not be a device: the type of such options and arguments.

A finished output is renamed into its place (`atomic_file.py`), which takes the place of whatever has the name: as root,
`-o /dev/null` would take the device from the whole machine, and a link to another disk would become a file of its own.
So a link is followed to the file that it leads to, and what is no regular file is refused before any work is done.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from tidegate.storage.atomic_file import check_replaceable


class OutputFile(click.Path):
    """The path of a file that is to be written; its value is where a link with that name leads to."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            return output_path(path)
        except OSError as error:
            self.fail(f"{path}: {error.strerror}", param, ctx)


def output_path(path: Path) -> Path:
    """Where the output of this name belongs: the end of its links, or the path itself where it is none.

    Raises:
        OSError: what has the name is no regular file, or the link may not be followed.
    """
    with suppress(FileNotFoundError):
        # The kernel follows no stranger's link in a folder that everybody writes (protected_symlinks). Only a call that
        # follows links asks it; `resolve` reads them.
        path.stat()
    target = path.resolve() if path.is_symlink() else path
    check_replaceable(target)
    return target

"""The option `--owner` of commands that write secrets for a service, which runs as a user of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from tidegate.storage.file_owner import FileOwner


class OwnerName(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """USER or USER:GROUP of this machine."""

    name = "user[:group]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> FileOwner:
        if isinstance(value, FileOwner):
            return value
        try:
            return FileOwner.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def owner_option(default: str) -> Callable[[Any], Any]:
    """The option itself. Args: default: what happens without it, in words."""
    return click.option(
        "--owner",
        type=OwnerName(),
        default=None,
        help=f"Give the files to this user, as whom the service reads them, and check that it can. Default: {default}.",
    )


def check_readable(owner: FileOwner | None, files: Iterable[Path]) -> None:
    """Raises ClickException when the user that the files were written for cannot read them."""
    if owner is not None and (why := owner.why_closed(files)):
        raise click.ClickException(f"--owner {owner}: the files are written, but {why}")
